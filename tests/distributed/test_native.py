"""Runs on torch's products whose operands Triton's kernels quantise, in its interpreter: on shards,
whose weights are gathered as codes, and in recorded steps (native_on_cpu.py, recorder_on_cpu.py).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gpu_stand_ins
import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.long

Ranks = Any

SMALL = (
    "model.width=64",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=2",
    "model.hidden=64",
    "train.steps=2",
    "train.seq_len=16",
    "eval.every=0",
    "policy=all",
    "phases=none",
    "backend=native",
    "recipe=nvfp4",
)
"""Shards of two ranks are whole blocks of 32 rows."""

EXACT = ("train.steps=5", "optim.lr=0.0078125", "schedule=constant", "schedule.warmup=0")
"""Three steps warm up, one is recorded; learning rates are float32 numbers, as a recorded step
reads them.
"""

PATCH = """
import sys
sys.path.append({scripts!r})
import gpu_stand_ins
import native_on_cpu
graphs = gpu_stand_ins.graphs(recorded={recorded!r})
graphs.__enter__()
native_on_cpu.install()
native_on_cpu.tell(f"launched{{rank}}.json")
"""

READ = 4 + 7
"""x and dy that a block quantises in a pass: an x of queries, keys and values, of `wo`, of gate and
up, of `down`; a dy of each layer.
"""


def patch(recorded: bool | str = False) -> str:
    return PATCH.format(scripts=str(Path(gpu_stand_ins.__file__).parent), recorded=recorded)


def launched(ranks: Ranks, count: int = 1) -> list[int]:
    """How often each rank quantised both forms of a tensor in one kernel, in its last run."""
    told = [(ranks.folder / f"launched{rank}.json").read_text() for rank in range(count)]
    return [json.loads(counts)["quantize_both"] for counts in told]


@pytest.fixture(scope="session")
def server(serving: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Ranks whose Triton interprets."""
    with serving(TRITON_INTERPRET="1") as process:
        yield process


def test_two_ranks_are_two_microbatches_of_one(ranks: Ranks) -> None:
    ranks.train(1, "one", "train.microbatch=2", *SMALL, patch=patch())
    assert launched(ranks) == [2 * 2 * READ]
    ranks.train(2, "two", *SMALL, patch=patch())
    assert launched(ranks, 2) == [2 * READ] * 2
    ranks.same("one", "two")


def test_a_recorded_step_has_the_bits_of_an_eager_one(ranks: Ranks) -> None:
    options = (*SMALL, *EXACT, "train.batch_size=2")
    counts = {}
    for name, recorded in (("eager", False), ("graph", True)):
        ranks.train(1, name, *options, patch=patch(recorded))
        counts[name] = launched(ranks)
    ranks.same("eager", "graph")
    assert counts == {"eager": [5 * READ], "graph": [4 * READ]}, "the last step is replayed"
