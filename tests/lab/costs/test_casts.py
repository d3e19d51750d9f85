"""Passes over weights and gradients beside the products, and those that quantise weights: as many
bytes as a step's operators and kernels move, and by the table.
"""

import importlib.util
from typing import Any
from unittest.mock import patch

import pytest
import torch
from host_passes import native_layer, without_kernels
from llama_shapes import executed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp4train as f4
from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs import casts
from fp4train.lab.costs.cluster import CASTS, ClusterCost
from fp4train.lab.costs.links import interconnect
from fp4train.lab.costs.quantising import own_passes
from fp4train.lab.costs.workload import Execution, Workload, workload
from fp4train.models.llama import Llama
from fp4train.nn.planned import PlannedLayer
from fp4train.parallel.config import Mesh
from fp4train.precision import BF16, MXFP8, NVFP4, FP8Current, FP8Row, Recipe, Timeline, autocast
from fp4train.precision.context import Context, use
from fp4train.precision.layers import find_layers
from fp4train.precision.plan import make_plan
from fp4train.quantize import triton_launch

B200 = find_gpu("B200")
VOCABULARY = 192
WIDTH = 64
SEQUENCES = 2
TOKENS = 48
PASSES = {
    "aten._to_copy.default": 1,
    "aten.mul_.Tensor": 2,
    "aten.add_.Tensor": 3,
    "aten.add.Tensor": 3,
}
"""Operators, and how many tensors of the size of their result they read and write, a cast beside
what it reads.
"""


class PassesOverWeights(TorchDispatchMode):
    """Adds up the bytes of operators whose result has the shape of a weight."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and tuple(out.shape) in self.shapes:
            self.bytes += PASSES.get(str(function), 0) * out.numel() * out.itemsize
            if "_to_copy" in str(function):
                self.bytes += args[0].numel() * args[0].itemsize
            if "embedding_dense_backward" in str(function):  # it begins with zeros
                self.bytes += out.numel() * out.itemsize
        return out


def built(tied: bool) -> torch.nn.Module:
    shape = Llama(width=WIDTH, layers=1, heads=2, kv_heads=1, hidden=160, tied=tied)
    return f4.convert(shape.build(vocab_size=VOCABULARY, seq_len=TOKENS), backend="emulate")


def moved(recipe: Recipe, microbatches: int, tied: bool) -> int:
    """Bytes of the passes over weights in a step on a CPU."""
    model = built(tied)
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    for layer in model.modules():
        if isinstance(layer, PlannedLayer):
            layer.sum_gradients(microbatches > 1)
    tokens = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS)
    with PassesOverWeights(shapes) as found:
        for _ in range(microbatches):
            with use(Context(recipe=recipe, seed=0, step=1)):
                loss = model(tokens, tokens)
            loss.backward()
    return found.bytes


def planned(
    recipe: Recipe, tied: bool = False, backend: str = "emulate", *, fused: bool = True
) -> Workload:
    with torch.device("meta"):
        model = built(tied)
    device = Device.elsewhere(B200)
    options: Any = {"tokens": SEQUENCES * TOKENS, "device": device, "backend": backend}
    plan = make_plan(find_layers(model).values(), Timeline(recipe=recipe, steps=1), None, **options)
    execution = Execution(fused=fused)
    layers = plan.stretches[0].layers
    return workload(model, layers, recipe, sequences=SEQUENCES, seq_len=TOKENS, execution=execution)


@pytest.mark.parametrize(
    ("recipe", "microbatches", "tied"),
    [
        (BF16(), 1, False),
        (BF16(), 1, True),
        (NVFP4(), 1, False),
        (MXFP8(), 3, False),
        (MXFP8(), 3, True),
    ],
    ids=["bf16", "bf16, tied", "nvfp4", "mxfp8, 3 microbatches", "mxfp8, tied, 3 microbatches"],
)
def test_a_step_on_this_machine_moves_the_bytes_that_an_estimate_has(
    recipe: Recipe, microbatches: int, tied: bool
) -> None:
    """A CPU adds no dw within its product."""
    load = planned(recipe, tied, fused=False)
    mesh = Mesh(microbatches=microbatches)
    counted = sum(casts.of_block(weight, load.execution, mesh) for weight in load.kinds[0].weights)
    assert counted + casts.of_ends(load, mesh, first=True, last=True) == moved(
        recipe, microbatches, tied
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), FP8Current()], ids=lambda recipe: recipe.name)
def test_kernels_that_quantise_a_weight_move_the_bytes_that_an_estimate_has(recipe: Recipe) -> None:
    """They read the float32 master, for each form but where one scale serves both: on native
    products, in a step.
    """
    moved = list[int]()
    size = 32 if recipe == FP8Current() else 128

    def note(launch: Any, *pointers: Tensor, **_: Any) -> None:
        if any(each.dtype == torch.float32 and each.shape == (size, size) for each in pointers):
            moved.append(sum(each.nbytes for each in pointers))

    with (
        without_kernels(),
        autocast(recipe, step=0),
        patch.object(triton_launch.Launch, "__call__", note),
    ):
        layer = native_layer(recipe)
        layer()
        layer()
    table = recipe.table()
    charged = own_passes(
        table["fprop"].second, table["dgrad"].second, size**2, codes=True, weight=4
    )
    assert len(moved) == sum(map(len, charged))
    assert sum(moved) == pytest.approx(size**2 * sum(map(sum, charged)), rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "backend", "per_weight"),
    [(BF16(), "auto", 6 + 2 * 12), (NVFP4(), "te", 3 * 4 + 2 * 12), (NVFP4(), "native", 2 * 12)],
)
def test_torchs_kernels_leave_the_sums_to_passes_of_autograd(
    recipe: Recipe, backend: str, per_weight: int
) -> None:
    """Transformer Engine then adds each dw of three microbatches to zeros."""
    load = planned(recipe, backend=backend, fused=False)
    mesh = Mesh(microbatches=3)
    for weight in (each for each in load.kinds[0].weights if each.multiplied_by):
        assert casts.of_block(weight, load.execution, mesh) == per_weight * weight.count


@pytest.mark.parametrize(
    ("recipe", "backend", "compiled", "mesh", "per_weight"),
    [
        (BF16(), "auto", False, Mesh(microbatches=3), 6),
        (BF16(), "auto", True, Mesh(microbatches=3), 3 * 6 + 3 * 6 + 2 * 12),
        (BF16(), "auto", False, Mesh(shard=2, microbatches=3), 0),
        (BF16(), "auto", True, Mesh(shard=2, gather="fp32"), 2 * 6 + 6),
        (NVFP4(), "te", False, Mesh(), 6),
        (NVFP4(), "te", False, Mesh(microbatches=3), 4),
        (NVFP4(), "te", False, Mesh(shard=2, microbatches=3), 4),
        (NVFP4(), "native", False, Mesh(replicate=2), 0),
        (NVFP4(), "native", False, Mesh(microbatches=3), 2 * 12),
        (NVFP4().with_high_precision("wgrad"), "native", False, Mesh(microbatches=3), 0),
        (FP8Row(), "native", False, Mesh(replicate=2), 6),
    ],
)
def test_who_rounds_a_weight_and_who_adds_its_gradients_decides_the_passes(
    recipe: Recipe, backend: str, compiled: bool, mesh: Mesh, per_weight: int
) -> None:
    """Torch's products and Transformer Engine add dw in float32 themselves; products of codes write
    it in float32, but for one scale per row.
    """
    load = executed(planned(recipe, backend=backend), compiled=compiled)
    weights = [weight for weight in load.kinds[0].weights if weight.multiplied_by]
    for weight in weights:
        assert casts.of_block(weight, load.execution, mesh) == per_weight * weight.count
    costs = ClusterCost(load, B200, interconnect(B200), mesh)
    moved = per_weight * sum(weight.count for weight in weights) + casts.of_ends(
        load, mesh, first=True, last=True
    )
    assert costs.parts.get(CASTS, 0.0) == pytest.approx(moved / (0.9 * B200.bandwidth))
