"""Recorded blocks of layers on Transformer Engine's real Python, with the extension of tests/backends/te, whose kernels
are operators of torch here: a recorder repeats them as a CUDA graph does (recorder_on_cpu.py)."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_stand_ins
import pytest
from wire import WIDE

from fp4train.backends.te import availability

pytestmark = pytest.mark.long

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)

Ranks = Any

PATCH = """
import json, pathlib, sys
sys.path.append({scripts!r})
import gpu_stand_ins
graphs = gpu_stand_ins.graphs(recorded={recorded!r})
graphs.__enter__()
import torch
import transformer_engine_torch as tex
import fp4train.train as loop
quantise, weights = tex.quantize, []
def drawing(x, quantizer, *rest):
    weights[-1] += x.dtype == torch.float32
    if getattr(quantizer, "stochastic_rounding", False):
        x = x * (1 + torch.rand(x.shape) / 64).to(x.dtype)
    return quantise(x, quantizer, *rest)
tex.quantize = drawing
def train_step(run, recipe, first=loop.train_step):
    weights.append(0)
    made = first(run, recipe)
    pathlib.Path(f"weights{{rank}}.json").write_text(json.dumps(weights))
    return made
loop.train_step = train_step
"""
"""dy that is rounded stochastically draws from torch's generator, as TE's kernel does (csrc/quantizer.cpp
NVFP4Quantizer::quantize_impl: philox_cuda_state, which a capture registers with the graph). Every rank writes how often
TE's Python quantised a weight in each step."""

ON = (*WIDE, "backend=te", "phases=none", "train.seq_len=32", "train.batch_size=4", "model.layers=1", "eval.every=0")
LAYERS = 7


def patch(recorded: bool | str) -> str:
    return PATCH.format(scripts=str(Path(gpu_stand_ins.__file__).parent), recorded=recorded)


@pytest.fixture(scope="module")
def server(serving: Any) -> Iterator["subprocess.Popen[str]"]:
    with serving("te_codes_on_cpu") as process:
        yield process


@pytest.mark.parametrize(
    ("count", "recipe", "recompute", "quantised"),
    [
        (1, "nvfp4", True, 1),
        (1, "fp8_current", False, 1),
        (2, "mxfp8", True, 6),
        (2, "nvfp4", False, 4),
        (2, "fp8_delayed", True, 6),
    ],
)
def test_recorded_blocks_of_te_layers_have_the_bits_of_eager_ones(
    ranks: Ranks, count: int, recipe: str, recompute: bool, quantised: int
) -> None:
    """Over two microbatches, of which the second takes the codes that the graph of the first has made, recomputed or
    not, and steps with other weights. Of shards TE keeps no codes: each pass makes its own, also the one that is
    recomputed. The last two steps are replayed."""
    options = (*ON, f"recipe={recipe}", f"train.microbatch={2 // count}", "parallel.gather=fp32")
    counts = []
    for name, recorded in (("eager", False), ("blocks", "block")):
        ranks.train(count, name, *options, f"model.recompute={str(recompute).lower()}", patch=patch(recorded))
        counts.append(json.loads((ranks.folder / "weights0.json").read_text()))
    ranks.same("eager", "blocks")
    assert counts == [[quantised * LAYERS] * 6, [quantised * LAYERS] * 4 + [0] * 2]
