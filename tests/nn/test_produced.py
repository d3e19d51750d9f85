"""Norms and gates that are quantised where they are made, in a model: against the same model without, in Triton's
interpreter, with recorded products in the place of scaled_mm; and where they are left to the model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4train as f4
from fp4train.hardware import Device, find_gpu
from fp4train.models.llama import Llama
from fp4train.nn.executors import make_executor
from fp4train.nn.produced import NormProducer, why_not
from fp4train.precision import MXFP8, NVFP4, FP8Delayed, Recipe
from fp4train.precision.layer_plan import resolve
from fp4train.precision.layers import Layer

pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import json
from collections import Counter
import torch
from recorded_products import Recorder
import fp4train as f4
from fp4train.backends import native
from fp4train.config.schema import TrainSettings
from fp4train.models.llama import Llama
from fp4train.nn import operands, scaling, weights
from fp4train.precision import MXFP8, NVFP4
from fp4train.precision.context import autocast
from fp4train.quantize import quantizer, sharded, triton_launch
from fp4train.run.fuse import fuse

launched, launch = [], triton_launch.Launch.__call__
def noted(self, *pointers, **words):
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)
triton_launch.Launch.__call__ = noted
native.why_not_blocks, native.F.scaled_mm = lambda *_: None, Recorder()
for module in (operands, scaling, sharded, weights):
    module.quantizer = lambda spec, device: quantizer(spec, device, "triton")
tokens = torch.randint(60, (2, 32), generator=torch.Generator().manual_seed(1))

def trained(recipe, kernels, hooked=False, **shape):
    shape = {"width": 64, "layers": 1, "heads": 4, "kv_heads": 2, "hidden": 96, "tied": False} | shape
    torch.manual_seed(0)
    model = f4.convert(Llama(**shape).build(vocab_size=60, seq_len=32), backend="native").train()
    fuse(model, TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=32, kernels=kernels), "cpu")
    if hooked:
        model.blocks[0].mlp.down.register_forward_hook(lambda *_: None)
        model.blocks[0].mlp.gate.register_forward_hook(lambda *_: None)
    launched.clear()
    for _ in range(2):
        with autocast(recipe, step=0):
            loss = model(tokens, tokens.flip(1))
        loss.backward()
    with torch.no_grad(), autocast(recipe, step=0):
        evaluated = model(tokens, tokens.flip(1))
    return {"loss": loss, "evaluated": evaluated} | {n: p.grad for n, p in model.named_parameters()}, Counter(launched)

told = {}
for name, recipe, options in (
    ("NVFP4", NVFP4(), {}),
    ("MXFP8", MXFP8(), {}),
    ("recomputed", MXFP8(), {"recompute": True}),
    ("biases", MXFP8(), {"qkv_bias": True}),
    ("watched", MXFP8(), {"hooked": True}),
):
    (plain, _), (fused, counts) = (trained(recipe, kernels, **options) for kernels in ("torch", "auto"))
    apart = {n: float((fused[n] - g).norm() / g.norm()) for n, g in plain.items() if not torch.equal(fused[n], g)}
    told[name] = [counts["amax_produced"], counts["quantize_produced"], counts["norm_backward"], apart]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def trained() -> Any:
    """Of each case the launches of two microbatches, and which tensors are not those of the model without, by how
    much."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "helpers")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "launches"),
    [
        ("NVFP4", [8, 8, 4]),
        ("MXFP8", [0, 8, 4]),
        ("recomputed", [0, 14, 4]),
        ("biases", [0, 8, 4]),
        ("watched", [0, 2, 2]),
    ],
)
def test_a_model_has_the_gradients_of_one_that_writes_norms_and_gates(
    trained: Any, case: str, launches: list[int]
) -> None:
    """In every bit: the sum of squares rounds alike at this width. The weights' gradients of norms are not rounded to
    BF16 here, whose half ulp is 2^-9. A microbatch takes two norms, a gate and its gradients."""
    *counts, apart = trained[case]
    assert counts == launches
    norms = {name for name in apart if name.endswith("_norm.weight")}
    assert set(apart) == norms and all(error < 2**-8 for error in apart.values()), apart


def executor(recipe: Recipe, name: str, backend: str = "auto") -> Any:
    layer = Layer(name=name, in_features=128, out_features=128, block=0, blocks=1)
    return make_executor(resolve(layer, recipe, None, backend, Device.elsewhere(find_gpu("B200"))), "cuda")


@pytest.mark.parametrize(
    ("readers", "writers", "reason"),
    [
        ((NVFP4(), NVFP4()), (), None),
        ((NVFP4(),), (NVFP4(), NVFP4()), None),
        ((MXFP8(),), (MXFP8(), MXFP8()), None),
        ((NVFP4(), MXFP8()), (), "b0 and b1 do not quantise x alike"),
        ((NVFP4(),), (NVFP4(), MXFP8()), "a0 and a1 do not quantise dy alike"),
        ((FP8Delayed(),), (), "x of b0: its amax enters a history of delayed scaling"),
        ((NVFP4().with_high_precision("wgrad"),), (), "x of b0: a product takes it in high precision"),
        ((NVFP4(),), (NVFP4().with_high_precision("dgrad"),) * 2, "dy of a0: a product takes it in high precision"),
    ],
)
def test_who_reads_says_why_it_does_not_take_codes(
    readers: tuple[Recipe, ...], writers: tuple[Recipe, ...], reason: str | None
) -> None:
    groups = {"b": readers, "a": writers}
    made = [[executor(each, f"{name}{i}", "native") for i, each in enumerate(group)] for name, group in groups.items()]
    assert why_not(*made) == reason


def test_layers_that_emulate_or_run_elsewhere_take_none() -> None:
    assert "takes its values, not its codes" in str(why_not([executor(NVFP4(), "w", "emulate")]))
    assert "is not three products of codes" in str(why_not([executor(f4.precision.BF16(), "w")]))


def test_where_no_reader_takes_codes_a_norm_is_the_models_in_every_bit() -> None:
    """A producer that does not run is asked, and nothing else changes: on a CPU, whose layers emulate."""
    found = []
    for asked in (False, True):
        torch.manual_seed(0)
        shape = Llama(width=64, layers=1, heads=4, kv_heads=2, hidden=96)
        model = f4.convert(shape.build(vocab_size=60, seq_len=32))
        block: Any = model.blocks[0]
        if asked:
            block.attention_norm.producer = NormProducer([block.attention.wq, block.attention.wk, block.attention.wv])
        with f4.autocast(NVFP4(), step=0):
            loss = model(torch.arange(32)[None], torch.arange(32)[None])
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
