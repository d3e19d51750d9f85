"""Norms and gates that quantise their results for layers on Transformer Engine's real Python whose
weights are shards (tests/backends/te/te_produced_on_cpu.py says what is faked)."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from patches import ASKS_FOR_MXFP8

from fp4train.backends.te import availability

pytestmark = pytest.mark.long

pytest.importorskip("triton", reason="triton is not installed")
if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

Ranks = Any
COUNTED = """
import json, pathlib
import te_produced_on_cpu as te
import fp4train.train as loop
first = loop.train_step
def train_step(run, recipe):
    te.launched.clear()
    made = first(run, recipe)
    pathlib.Path(f"launched{rank}.json").write_text(json.dumps(te.launched))
    return made
loop.train_step = train_step
"""
"""Every rank writes the kernels of the last step that made codes."""
SMALL = (
    "model.width=64",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.hidden=96",
    "backend=te",
)
STEPS = ("policy=all", "phases=none", "train.steps=2", "train.seq_len=16", "train.batch_size=4")


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator["subprocess.Popen[str]"]:
    with serving("te_produced_on_cpu", TRITON_INTERPRET="1") as process:
        yield process


def launched(ranks: Ranks, name: str) -> int:
    return list(json.loads((ranks.folder / "launched0.json").read_text())).count(name)


def test_two_ranks_whose_norms_and_gates_are_quantised_are_two_microbatches(ranks: Ranks) -> None:
    """Four norms, two gates and their gradients in each pass, with the random bits of the tokens'
    place.
    """
    options = (*SMALL, *STEPS, "recipe=nvfp4")
    ranks.train(1, "one", "train.microbatch=2", *options, patch=COUNTED)
    assert launched(ranks, "quantize_produced") == 2 * 8
    ranks.train(2, "two", *options, patch=COUNTED)
    assert launched(ranks, "quantize_produced") == 8
    ranks.same("one", "two")


def test_after_a_swap_the_end_names_the_layers_of_all_stages_whose_x_exists_in_codes_alone(
    ranks: Ranks,
) -> None:
    """Six of seven layers in each of two blocks, of which each rank has one."""
    steps = ("train.steps=3", "audit.every=1")
    options = (*SMALL, *STEPS, *steps, "recipe=nvfp4", "train.microbatch=2", "parallel.pp=2")
    ended = ranks(2, "run.name=a", *options, patch=ASKS_FOR_MXFP8)
    assert ended.codes == [0, 0], ended.err
    text = " ".join(ended.err[0].split())
    assert "swap: recipe mxfp8 from step 2 on" in text
    assert text.count("blocks.0.attention.wv and 9 more (its x exists in codes alone") == 2
