"""Ranks that wait for one that hangs, is stopped or does not come: how long, and what they say."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from patches import fails_at_3, told

Ranks = Any

HANGS = """
import time
from datetime import timedelta
import torch
import torch.distributed.distributed_c10d as c10d
import fp4train.parallel.launch as launch
import fp4train.train as loop
from fp4train.parallel.world import World

TIMEOUT = timedelta(seconds=200)
within, fail, train_step = launch.within, World.fail, loop.train_step

def shorten_timeouts():
    for group in c10d._world.pg_map:
        backend = group._get_backend(torch.device("cpu"))
        if backend.options._timeout == TIMEOUT:
            c10d._set_pg_timeout(timedelta(seconds=4), group)

def shortened_at_3(run, recipe):
    if run.step == 3:
        shorten_timeouts()
    return train_step(run, recipe)

def fail_in_turn(world, error):
    store = world.meeting.store
    store.set(f"lost/{rank}", "")
    if "imed out" in str(error):
        store.wait([f"lost/{other}" for other in range(3) if other != HANGING], TIMEOUT)
    elif isinstance(error, RuntimeError):
        store.wait(["word"], TIMEOUT)
    fail(world, error)

launch.within = lambda seconds, ask, otherwise: within(200, ask, otherwise)
World.fail = fail_in_turn
loop.train_step = shortened_at_3
"""
"""The groups whose timeout is that of the configuration have a shorter one from the step at which
the rank HANGING hangs. The first rank that it ends breaks the connections of others, which may see
that before their own time is over: who has timed out speaks, when all have noticed.
"""


@pytest.mark.long
def test_a_rank_that_hangs_is_named_by_one_of_those_that_waited(ranks: Ranks) -> None:
    rank = 2
    options = (
        "run.name=a",
        "parallel.timeout=200",
        "parallel.dp_replicate=3",
        "train.batch_size=3",
    )
    patch = "\n".join([f"HANGING = {rank}", HANGS, fails_at_3(rank, "time.sleep(1000)")])
    job = ranks.start(3, *options, patch=patch)
    said = [
        line
        for text in job.wait().err
        for line in text.splitlines()
        if line.startswith("fp4train: ")
    ]
    assert len(said) == 1, said
    assert (
        f" lost rank {rank} on " in said[0]
        and ", which did not answer within parallel.timeout=200 s" in said[0]
    )


SLOW_DISK = """
import time
import torch
import torch.distributed.distributed_c10d as c10d
import fp4train.train as loop
from datetime import timedelta
from fp4train import checkpoint
from fp4train.run.supervise import saving

saving.LOOK_SECONDS = 0.5
save, train_step = checkpoint.save, loop.train_step

def shortened(run, recipe):
    if run.step == 2:
        for group in c10d._world.pg_map:
            backend = group._get_backend(torch.device("cpu"))
            if backend.options._timeout == timedelta(seconds=200):
                c10d._set_pg_timeout(timedelta(seconds=5), group)
    return train_step(run, recipe)

def slow(folder, step, *rest, **options):
    if rank == 1 and step == 3:
        time.sleep(12)
    return save(folder, step, *rest, **options)

loop.train_step, checkpoint.save = shortened, slow
"""
"""The write of one rank takes longer than a collective waits."""


@pytest.mark.long
def test_a_rank_with_a_slow_disk_is_named_and_waited_for(ranks: Ranks) -> None:
    options = ("parallel.timeout=200", "train.steps=4", "checkpoint.every=3", "phases=none")
    ended = ranks(2, "run.name=a", *options, patch=SLOW_DISK)
    assert ended.codes == [0, 0], ended.err
    said = [line for line in ended.err[0].splitlines() if "a slow disk?" in line]
    assert len(said) == 1 and "of step 3 is being written after 0.5 s by rank 1 on " in said[0]
    assert ranks.state("a")


TELLS_TIMEOUTS = """
import json
import torch
import torch.distributed.distributed_c10d as c10d
import fp4train.train as loop
train_step = loop.train_step
def told(run, recipe):
    backends = [group._get_backend(torch.device("cpu")) for group in c10d._world.pg_map]
    seconds = [backend.options._timeout.total_seconds() for backend in backends]
    with open(f"timeouts{rank}.json", "w") as file:
        json.dump(seconds, file)
    return train_step(run, recipe)
loop.train_step = told
"""


def test_every_group_of_ranks_waits_as_long_as_the_configuration_says(ranks: Ranks) -> None:
    """Those of the mesh too, which torch makes, and those of stages and shards of one rank."""
    options = ("parallel.pp=2", "parallel.timeout=200", "train.steps=1", "phases=none")
    ranks.train(2, "a", *options, "train.microbatch=1", "eval.every=0", patch=TELLS_TIMEOUTS)
    for rank in range(2):
        timeouts = json.loads((ranks.folder / f"timeouts{rank}.json").read_text())
        assert len(timeouts) > 4 and sorted(timeouts)[:-1] == [200.0] * (len(timeouts) - 1)
        assert max(timeouts) == 600.0, "threads that write checkpoints wait for slow disks"


STOPS = """
import os, time
from fp4train.parallel import attendance

attendance.BEAT_SECONDS, attendance.SILENT_SECONDS = 0.2, 1.5
say = attendance.Attendance._say

def say_if_asked(self, now):
    if os.path.exists(f"ask{rank}"):
        say(self, now)
        if rank == STOPPED:
            os.remove(f"ask{rank}")

def stop():
    os.kill(os.getpid(), 19)
    while os.path.exists(f"ask{rank}"):
        time.sleep(0.01)

attendance.Attendance._say = say_if_asked
"""
"""A rank that waits for a processor gives no signs, either: ranks look at the signs while the file
askRANK is there, the rank STOPPED once.
"""


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_while_the_others_wait(ranks: Ranks, rank: int) -> None:
    """Rank 0 keeps the store: where it is stopped, nothing in there answers. Who goes on costs
    nothing, and names nobody.
    """
    patch = "\n".join([f"STOPPED = {rank}", STOPS, fails_at_3(rank, "stop()")])
    job = ranks.start(2, "run.name=a", patch=patch)
    state = Path(f"/proc/{job.processes[rank]}/stat")
    ranks.until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    asks = [ranks.folder / f"ask{number}" for number in range(2)]
    asks[1 - rank].touch()
    told = ranks.folder / f"rank{1 - rank}.err"
    ranks.until(lambda: "no sign for" in told.read_text())
    asks[1 - rank].unlink()
    asks[rank].touch()
    os.kill(job.processes[rank], signal.SIGCONT)
    ended = job.wait()
    assert ended.codes == [0, 0], ended.err
    (line,) = [line for line in ended.err[1 - rank].splitlines() if "no sign for" in line]
    assert f"rank {rank} on " in line
    assert "the others wait for it, up to parallel.timeout=1800 s" in line
    assert "no sign for" not in ended.err[rank]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_named_after_a_bounded_time(ranks: Ranks, rank: int) -> None:
    patch = (
        "import os\nimport fp4train.parallel.launch as m\nm.PATIENCE = 2.0\nif rank == "
        f"{rank}:\n    os._exit(9)"
    )
    ended = ranks(2, "run.name=a", patch=patch)
    assert ended.codes == ([75, 9] if rank else [9, 75]) and ended.seconds < 60
    assert ("rank 1 did not come to" if rank else "rank 1 of 2 does not reach rank 0 at") in told(
        ended, by=1 - rank
    )
    assert "within 2 s" in told(ended, by=1 - rank)


@pytest.mark.long
def test_a_rank_that_hangs_is_found_with_its_stack(ranks: Ranks) -> None:
    ended = ranks(2, "run.name=a", "train.step_timeout=6", patch=fails_at_3(1, "time.sleep(1000)"))
    assert all(ended.codes) and "in step" in ended.err[1] and "Thread 0x" in ended.err[1]
