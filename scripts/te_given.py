"""Results of Transformer Engine for a layer whose weight fp4train's kernels quantise, or leave to it: a part of
te_selfcheck.py."""

from __future__ import annotations

from te_problem import Problem, Row, compare, place
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.backends.te import TRANSFORMER_ENGINE, TEExecutor
from fp4train.hardware import Device
from fp4train.precision import Recipe
from fp4train.quantize import Decoded, quantizer


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


def check_weights(name: str, recipe: Recipe, problem: Problem) -> Row:
    """Part 3 for one recipe."""
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
