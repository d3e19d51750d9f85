"""Code that a rank of a job runs first (`Ranks`), which several tests use."""

DIES_AT_4 = """
import fp4train.train as loop
original = loop.train_step
def train_step(run, recipe):
    if run.step == 4:
        import os
        run.saver.wait(); run.world.wait(); os._exit(0)
    return original(run, recipe)
loop.train_step = train_step
"""
"""The process ends before its fifth step, as if it were killed."""
