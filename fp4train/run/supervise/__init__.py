"""What watches a run and keeps its state: ledger, guard, rescue, checkpoints, signals."""
