"""Supervision of a run: ledger, guard, rescue, checkpoints, signals."""
