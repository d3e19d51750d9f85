"""Results of Transformer Engine whose operands fp4train's kernels quantise, or leave to it: norms and gates of a small
model, the weight of a layer. Parts of te_selfcheck.py."""

from __future__ import annotations

import torch
from te_problem import STOCHASTIC, Problem, Row, compare, place
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.backends.te import TRANSFORMER_ENGINE, TEExecutor
from fp4train.config.schema import TrainSettings
from fp4train.hardware import Device
from fp4train.models.llama import Llama
from fp4train.nn import convert
from fp4train.precision import Recipe
from fp4train.precision.context import autocast
from fp4train.quantize import Decoded, quantizer
from fp4train.run.fuse import fuse

BACKEND = "te"
ROUNDED = ("nvfp4, nearest", "mxfp8", "mxfp8, hybrid")
"""Recipes of the part `given`: they round to nearest."""


def gradients(
    recipe: Recipe, kernels: str, device: str = "cuda", width: int = 512
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the weights of down, the embedding and gate, of one pass of 128 tokens.

    Args:
        kernels: of `train.kernels`: "auto" quantises norms and gates where they are made, "torch"
            does not.
        width: of a Llama of one block.
    """
    torch.manual_seed(0)
    shape = Llama(width=width, layers=1, heads=4, kv_heads=2, hidden=2 * width, tied=False)
    model = convert(shape.build(vocab_size=64, seq_len=64), backend=BACKEND).to(device)
    fuse(
        model,
        TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=64, kernels=kernels),
        device,
    )
    tokens = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    with autocast(recipe, step=0):
        loss = model(tokens, tokens.flip(1))
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    embedding = next(name for name in found if not name.startswith("blocks."))
    return found["blocks.0.mlp.down.weight"], found[embedding], found["blocks.0.mlp.gate.weight"]


def products(
    recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor, *, given: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw of a layer whose float32 weight w [N, K] is `given` as codes, as shards gather
    it, or as values.
    """
    table = recipe.table()
    weight = w.float().requires_grad_()
    x = x.detach().requires_grad_()

    def codes(column: bool) -> Prepared:
        spec = table["dgrad" if column else "fprop"].second
        values = weight.detach().T if column else weight.detach()
        return (
            Decoded(values.to(table.torch_dtype), None)
            if spec is None
            else quantizer(spec, w.device.type).codes(values)
        )

    y = TEExecutor(name="given")(
        x, weight, None, table, freed=given, codes=codes if given else None
    )
    y.backward(dy)  # type: ignore[no-untyped-call]
    assert x.grad is not None and weight.grad is not None
    return y.detach(), x.grad, weight.grad


def check_given(name: str, recipe: Recipe, problem: Problem) -> Row:
    """Part 3 for one recipe, which rounds to nearest, of a Llama as wide as x."""
    device = problem.w.device.type
    width = problem.w.shape[1]
    ours, theirs = (gradients(recipe, kernels, device, width) for kernels in ("auto", "torch"))
    return compare("given", name, theirs, ours, STOCHASTIC)


def check_weights(name: str, recipe: Recipe, problem: Problem) -> Row:
    """Part 4 for one recipe."""
    if any(spec.delayed or spec.rounding == "stochastic" for spec in recipe.table().specs()):
        return Row(part="weights", name=name, note="random bits or histories differ")
    reason = TRANSFORMER_ENGINE.why_values(
        recipe.table(), place(problem), Device.of(problem.w.device)
    )
    if reason:
        return Row(part="weights", name=name, note=reason)
    ours, theirs = (
        products(recipe, problem.x, problem.w, problem.dy, given=given) for given in (True, False)
    )
    return compare("weights", name, theirs, ours, 0.0)
