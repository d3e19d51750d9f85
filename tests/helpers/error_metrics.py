"""Error metrics of a quantised tensor, by their formulas.

With x the tensor and y its dequantised values, both in the domain of the codes (after a Hadamard
transform): relative error |y-x| / |x| (2-norms); SQNR = 10 log10(|x|^2 / |y-x|^2) in dB; underflow:
the share of x's nonzero elements whose y is zero; saturation: the share of elements clipped because
they exceed the range of their block; kurtosis E[(x-m)^4] / Var^2 (3 for a normal distribution;
outliers raise it); amax.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from fp4train.measure.statistics import largest_values
from fp4train.quantize import QuantSpec, RandomKey, quantize
from fp4train.quantize.transform import transform


@dataclass(frozen=True, kw_only=True)
class ErrorMetrics:
    """Shares lie between 0 and 1."""

    relative_error: float
    sqnr_db: float
    underflow: float
    saturation: float
    kurtosis: float
    amax: float


def measure(x_RC: Tensor, spec: QuantSpec, key: RandomKey | None = None) -> ErrorMetrics:
    """Metrics of x [R, C] quantised by `spec`, of which something is lost."""
    q = quantize(x_RC, spec, key=key)
    x = x_RC if spec.hadamard is None else transform(x_RC, spec.hadamard, key)
    x = x.float()
    y = q.dequantize()
    clipped = x.abs() > largest_values(q)
    amax = x.abs().amax()
    x = (
        x / amax
    ).double()  # squares and fourth powers of 1e30 or 1e-30 exceed the range of float32
    y = (y / amax).double()
    ratio = ((y - x).square().sum() / x.square().sum()).item()
    centred = x - x.mean()
    return ErrorMetrics(
        relative_error=math.sqrt(ratio),
        sqnr_db=-10 * math.log10(ratio),
        underflow=(y[x != 0] == 0).double().mean().item(),
        saturation=clipped.double().mean().item(),
        kurtosis=(centred.pow(4).mean() / centred.square().mean() ** 2).item(),
        amax=amax.item(),
    )
