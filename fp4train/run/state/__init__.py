"""The states of a run, a file each; `run/states.py` lists them."""
