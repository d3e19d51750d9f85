"""Runs whose norms and gates are quantised where they are made, in Triton's interpreter: on shards,
whose weights are gathered as codes or as float32, and in recorded steps and blocks
(native_on_cpu.py, recorder_on_cpu.py).
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
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=2",
    "model.hidden=64",
    "train.steps=2",
    "train.seq_len=16",
    "eval.every=0",
    "policy=all",
    "phases=none",
    "backend=native",
)
"""Shards of two ranks are whole blocks of 32 rows."""

EXACT = ("train.steps=5", "optim.lr=0.0078125", "schedule=constant", "schedule.warmup=0")
"""Three steps warm up, one is recorded; learning rates are float32 numbers, as a recorded step
reads them.
"""

PATCH = """
import sys
sys.path.append({scripts!r})
import gpu_stand_ins, native_on_cpu
from fp4train.nn.fused_norm import KernelNorm
graphs = gpu_stand_ins.graphs(recorded={recorded!r})
graphs.__enter__()
native_on_cpu.install()
codes = KernelNorm.codes

def counted(self, x, change, weight_K):
    native_on_cpu.launched["sums"] += change is not None
    return codes(self, x, change, weight_K)

KernelNorm.codes = counted
native_on_cpu.tell(f"launched{{rank}}.json")
"""


def patch(recorded: bool | str = False) -> str:
    return PATCH.format(scripts=str(Path(gpu_stand_ins.__file__).parent), recorded=recorded)


def produced(ranks: Ranks, count: int = 1) -> list[tuple[int, int]]:
    """How often each rank launched a kernel that quantises what is made, and how many norms added
    the terms of the stream, in its last run.
    """
    told = [
        json.loads((ranks.folder / f"launched{rank}.json").read_text()) for rank in range(count)
    ]
    return [
        (each.get("quantize_produced", 0) + each.get("turned_produced", 0), each.get("sums", 0))
        for each in told
    ]


@pytest.fixture(scope="session")
def server(serving: Callable[..., AbstractContextManager[Any]]) -> Iterator[Any]:
    """Ranks whose Triton interprets."""
    with serving(TRITON_INTERPRET="1") as process:
        yield process


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("nvfp4", ()),
        ("fp8_current", ("train.steps=1",)),
        ("mxfp8", ("train.steps=1", "parallel.gather=fp32", "model.recompute=true")),
    ],
)
def test_two_ranks_are_two_microbatches_of_one(
    ranks: Ranks, recipe: str, options: tuple[str, ...]
) -> None:
    """A block launches it for two norms, a gate and its gradients, where it is recomputed also for
    three again. Norms add within a block and, but for recomputed blocks, at the beginning of the
    second one. Only weights of a second step are others than those that all ranks drew: one recipe
    takes it.
    """
    recomputed = "model.recompute=true" in options
    steps = 1 if "train.steps=1" in options else 2
    sums = steps * (4 if recomputed else 3)
    launches = steps * 2 * (7 if recomputed else 4)  # of two blocks
    alone = [option for option in options if not option.startswith("parallel.")]
    ranks.train(1, "one", "train.microbatch=2", *SMALL, *alone, f"recipe={recipe}", patch=patch())
    assert produced(ranks) == [(2 * launches, 2 * sums)]
    ranks.train(2, "two", *SMALL, *options, f"recipe={recipe}", patch=patch())
    assert produced(ranks, 2) == [(launches, sums)] * 2
    ranks.same("one", "two")


def test_two_stages_are_one_whose_last_sum_is_torchs(ranks: Ranks) -> None:
    """Of two microbatches of one step. Of three blocks the norms of two add the last sum of the
    one before; that at the end of the first stage, of two, is added by torch.
    """
    options = (
        *SMALL,
        "model.layers=3",
        "train.steps=1",
        "train.batch_size=2",
        "train.microbatch=1",
        "recipe=mxfp8",
    )
    ranks.train(1, "one", *options, patch=patch())
    assert produced(ranks) == [(2 * 3 * 4, 2 * 5)]
    ranks.train(2, "two", "parallel.pp=2", *options, patch=patch())
    assert produced(ranks, 2) == [(2 * 2 * 4, 2 * 3), (2 * 4, 2 * 1)]
    ranks.same("one", "two")


def test_a_recorded_step_has_the_bits_of_an_eager_one(ranks: Ranks) -> None:
    """The second block quantises, and has the sum of the first."""
    options = (*SMALL, *EXACT, "policy.first=1", "train.batch_size=2", "recipe=nvfp4")
    counts = {}
    for name, recorded in (("eager", False), ("graph", True)):
        ranks.train(1, name, *options, patch=patch(recorded))
        counts[name] = produced(ranks)
    ranks.same("eager", "graph")
    assert counts == {"eager": [(5 * 4, 5 * 2)], "graph": [(4 * 4, 4 * 2)]}, (
        "the last step is replayed"
    )
