"""Error metrics of a quantised tensor.

With x the tensor and y its dequantised values, both in the domain of the codes (after a Hadamard
transform): relative error |y-x| / |x| (2-norms); SQNR = 10 log10(|x|^2 / |y-x|^2) in dB; underflow:
the share of x's nonzero elements whose y is zero; saturation: the share of elements clipped because
they exceed the range of their block; kurtosis E[(x-m)^4] / Var^2 (3 for a normal distribution;
outliers raise it); amax.
"""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from fp4train.quantize import Quantized, QuantSpec, RandomKey, quantize
from fp4train.quantize.quantized import apply_block_scales, operand_width
from fp4train.quantize.transform import transform


@dataclass(frozen=True, kw_only=True)
class ErrorMetrics:
    """Plain numbers for a logger. Shares lie between 0 and 1; an exact result has sqnr_db = inf."""

    relative_error: float
    sqnr_db: float
    underflow: float
    saturation: float
    kurtosis: float
    amax: float

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Pairs of name and value, for `dict(metrics)`."""
        return zip((field.name for field in fields(self)), astuple(self), strict=True)


def measure(
    x_RC: Tensor, spec: QuantSpec, *, key: RandomKey | None = None, amax: Tensor | None = None
) -> ErrorMetrics:
    """Quantise x [R, C] by `spec` and measure the error. Synchronises with the device once."""
    return error_metrics(x_RC, quantize(x_RC, spec, key=key, amax=amax), key=key)


def error_metrics(x_RC: Tensor, q: Quantized, *, key: RandomKey | None = None) -> ErrorMetrics:
    """Metrics of `q`, the x_RC quantised with `key`. NaN or infinity in x gives NaN; an empty x
    gives zeros.
    """
    x = x_RC.detach()
    if q.spec.hadamard is not None:
        x = transform(x, q.spec.hadamard, key)
    x = x.to(torch.float32)
    if x.numel() == 0:
        return ErrorMetrics(
            relative_error=0.0,
            sqnr_db=math.inf,
            underflow=0.0,
            saturation=0.0,
            kurtosis=0.0,
            amax=0.0,
        )
    y = q.dequantize()
    clipped = (x.abs() > largest_values(q)).sum()
    nonzero = (x != 0).sum()
    lost = ((y == 0) & (x != 0)).sum()
    # Divide by amax first: squares and fourth powers of 1e30 or 1e-30 exceed the range of float32.
    amax = x.abs().amax()
    unit = torch.where(amax > 0, amax, 1.0)
    x = x / unit
    y = y / unit
    signal = x.square().mean()
    noise = (y - x).square().mean()
    centred = x - x.mean()
    moments = torch.stack(
        (signal, noise, centred.square().mean(), centred.square().square().mean(), amax)
    )
    counts = torch.stack((clipped, nonzero, lost)).tolist()
    power, error, variance, fourth, largest = moments.tolist()
    ratio = error / power if power else 0.0
    return ErrorMetrics(
        relative_error=math.sqrt(ratio),
        sqnr_db=-10.0 * math.log10(ratio) if ratio else math.inf,
        underflow=counts[2] / counts[1] if counts[1] else 0.0,
        saturation=counts[0] / x.numel(),
        kurtosis=fourth / variance**2 if variance else 0.0,
        amax=largest,
    )


def largest_values(q: Quantized) -> Tensor:
    """The largest magnitude that the block of each element can represent: max * block scale *
    global scale, [R, C].
    """
    spec = q.spec
    values = torch.full(q.element_codes.shape, spec.format.max, device=q.codes.device)
    values = apply_block_scales(values, q.block_scales(), spec)
    if (scale := q.global_decode()) is not None:
        values = values * scale
    return values[:, : operand_width(spec, q.shape[1])]
