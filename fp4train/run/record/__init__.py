"""The records of a run beside its checkpoints: directory, configuration, history, requests."""
