"""Code that a rank of a job runs first (`Ranks`), and what it says, which several tests use."""

from typing import Any

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


def fails_at_3(rank: int, what: str) -> str:
    """Code that does `what` on `rank` before the fourth step."""
    patch = "import os, time, fp4train.train as loop\noriginal = loop.train_step\n"
    patch += f"def step(run, recipe):\n    if run.step == 3 and rank == {rank}:\n        {what}\n"
    return patch + "    return original(run, recipe)\nloop.train_step = step"


def told(ended: Any, *, by: int) -> str:
    """The one message of a job, and that no other rank gave one."""
    lines = [
        [line for line in text.splitlines() if line.startswith("fp4train: ")] for text in ended.err
    ]
    assert [len(texts) for texts in lines] == [int(rank == by) for rank in range(len(lines))], (
        ended.err
    )
    assert "Traceback" not in ended.err[by]
    return str(lines[by][0])
