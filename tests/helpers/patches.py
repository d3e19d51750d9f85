"""Code that a rank of a job runs first (`Ranks`), which several tests use."""

DIES_AT_3 = """
import fp4train.train as loop
original = loop.train_step
def train_step(run, recipe):
    if run.step == 3:
        import os
        run.saver.wait(); run.world.wait(); os._exit(0)
    return original(run, recipe)
loop.train_step = train_step
"""
"""The process ends before its fourth step, as if it were killed."""

ASKS_FOR_MXFP8 = """
import fp4train.train as loop
original = loop.train_step
def train_step(run, recipe):
    if run.step == 0 and not rank:
        from fp4train.run.record.inbox import ask
        body = {'_target_': 'fp4train.precision.MXFP8'}
        ask(run.directory, {'recipe': body, 'name': 'mxfp8', 'at': 2})
    return original(run, recipe)
loop.train_step = train_step
"""
"""The lead asks in its first step for a swap to MXFP8 at step 2."""

GRAPHS = (
    "import functools, torch; torch.compile = functools.partial(torch.compile, backend='aot_eager')"
)
"""With train.compile=true blocks are traced as ever, and their graphs run kernel by kernel:
inductor takes long.
"""
