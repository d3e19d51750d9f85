"""What a run keeps of itself beside its checkpoints: directory, configuration, history, requests."""
