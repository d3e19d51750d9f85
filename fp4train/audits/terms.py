"""GEMMs whose operands have two terms: the means that are taken out, and the terms that follow the
product of the codes (the formulas of `nn.executors.terms`).

Means are sums in float32 whose order the device chooses: one must lie within (M + 8)·2⁻²⁴·mean|x| of
that in float64. What follows is made from the mean that was taken.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fp4train.audits import products
from fp4train.audits.bits import where_differing
from fp4train.audits.call import Product
from fp4train.audits.expected import AuditedCall
from fp4train.audits.fault import CallFinding
from fp4train.backends.protocol import NotShownError
from fp4train.nn.executors.joined import Term
from fp4train.precision.layer_plan import Gemm
from fp4train.precision.terms import Residual
from fp4train.quantize import Decoded, reference

RESIDUAL_CHANNELS: Final = "the channels of residuals, which sums of another device choose"
_ROWS: Final = {"fprop": "x", "dgrad": "dy"}
"""GEMM → the tensor whose mean is multiplied by w."""
_ULP: Final = 2.0**-24


def of_means(audited: AuditedCall, gemm: str) -> Iterator[CallFinding]:
    """The means must be those of their tokens."""
    name = _ROWS.get(gemm, "")
    mean = audited.call.means.get(name)
    tensor = audited.tensor(name) if name else None
    if mean is None or tensor is None or not len(tensor):
        return
    exact = tensor.double()
    bound = (len(exact) + 8) * _ULP * exact.abs().mean(0)
    error = (mean.double() - exact.mean(0)).abs()
    apart = where_differing(~(error <= bound))
    if apart is not None and bool(exact.isfinite().all()):
        yield CallFinding(f"the mean of {name} is not that of its tokens", apart, operand=name)


def further_terms(audited: AuditedCall, gemm: Gemm, product: Product) -> list[Term]:
    """The operands of the products that follow that of the codes.

    Raises:
        NotShownError: they are made of what is not seen.
    """
    name = gemm.name
    recipe = audited.plan.recipe
    means = audited.call.means
    terms: list[Term] = []
    if name == "wgrad":
        if any(audited.takes_mean(name, tensor) for tensor in ("x", "dy")):
            dy = audited.tensor("dy")
            if dy is None or means.keys() < {"x", "dy"}:
                raise NotShownError("the sum, whose means are not seen")
            column = (means["dy"] * len(dy)).unsqueeze(1)
            terms.append((Decoded(column, None), Decoded(means["x"].unsqueeze(1), None)))
        return terms
    if audited.takes_mean(name, _ROWS[name]):
        rows = means[_ROWS[name]].expand(len(product.result), -1)
        terms.append((Decoded(rows, None), products.decoded(product.right)))
    if name == "fprop" and recipe.residual is not None and gemm.operands.quantised:
        terms += _residuals(audited, recipe.residual, product)
    return terms


def _residuals(audited: AuditedCall, residual: Residual, product: Product) -> Iterator[Term]:
    if residual.share < 1 and product.elsewhere:
        raise NotShownError(RESIDUAL_CHANNELS)
    values = {
        "x": products.decoded(product.left).tensor(torch.float32),
        "w": products.decoded(product.right).tensor(torch.float32),
    }
    remainders: dict[str, Tensor] = {}
    for name in residual.tensors:
        tensor = audited.tensor(name)
        if tensor is None:
            raise NotShownError(f"residuals of {name}, whose values are not seen")
        if name == "x":
            tensor = audited.centred("fprop", "x", tensor)
        remainders[name] = tensor.float() - values[name]
    channels = torch.arange(values["x"].shape[1])
    if residual.share < 1:
        score = torch.stack([values.abs().mean(0) for values in remainders.values()]).sum(0)
        largest = score.sort(descending=True, stable=True).indices
        channels = largest[: residual.count(len(score))].sort().values
    for name, remainder in remainders.items():
        if residual.spec is None:
            term = Decoded(remainder[:, channels].to(audited.dtype), None)
        else:
            term = reference.quantize(remainder[:, channels], residual.spec).decoded()
        if name == "x":
            yield term, Decoded(values["w"][:, channels], None)
        else:
            yield Decoded(values["x"][:, channels], None), term
