"""Statistics of every operand of every layer in a step that trains: sampled in hooks, computed
without waiting.

While `watch` is active, hooks keep a sample of x [M, K] and dy [M, N] of each linear layer's first
call and of its weight [N, K]: `GROUPS` groups of 128 rows, evenly spaced, and the amax of the
whole. 128 rows hold whole blocks of every recipe. From the samples come the six operands, each
quantised with the layer's spec and the whole amax. (With a Hadamard transform, or a scale for each
row, the amax is that of the sample.) The cost does not grow with the batch.

Of a group of weights (experts) they are those of the weight with the most rows of that call, and
the noise is that of its gradient as a part of the group's.

x and w are the columns that the layer's own recipe multiplied (`Executor.quantised_columns`).

The noise of a weight gradient is that of its own product, as in "FP4 All the Way" (arXiv
2505.19115): ‖q(dyᵀ)·q(xᵀ)ᵀ - dyᵀ·x‖ of the sampled tokens; its square grows with the number of
tokens. What the forward pass and the dgrads of later layers add to dy is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp4train.backends import GEMMS, OPERANDS, sourced
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import Layer
from fp4train.quantize import Decoded, Quantized, QuantSpec, RandomKey, quantizer
from fp4train.quantize.quantized import apply_block_scales, operand_width
from fp4train.quantize.transform import transform

if TYPE_CHECKING:
    from fp4train.nn.planned import PlannedLayer

GROUPS = 2
GROUP = 128
NAMES = tuple(f"{gemm}.{operand}" for gemm in GEMMS for operand in OPERANDS[gemm])
"""The six operands, in the order in which results number them."""
RAW = (
    "amax",
    "signal",
    "error",
    "variance",
    "fourth",
    "clipped",
    "nonzero",
    "lost",
    "elements",
    "scales",
    "smallest_scale",
    "largest_scale",
)
"""The measurements of an operand: its amax; means of x², (y-x)², (x-x̄)², (x-x̄)⁴ for x over its
amax; counts of elements clipped, not zero, and lost to zero, and of all; block scales: codes in
use, smallest above zero, largest.
"""


@dataclass
class Sample:
    """Rows of a tensor and the amax of the whole, float32 0-d."""

    rows: Tensor
    amax: Tensor


@dataclass
class Seen:
    """The samples of one layer's first call."""

    w: Sample | None = None
    x: Sample | None = None
    dy: Sample | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    hooked: bool = False


@dataclass
class WatchedLayers:
    """The operands that `watch` saw, by layer name."""

    seen: dict[str, Seen] = field(default_factory=dict)

    def measure(self, plans: Mapping[str, LayerPlan], key: RandomKey) -> Measured:
        """The statistics of all quantised operands, still on the device.

        Args:
            plans: the plans of the layers, by name.
            key: key of stochastic rounding, for other random bits than the step itself used.
        """
        layers: list[str] = []
        at: list[tuple[int, int]] = []
        rows: list[Tensor] = []
        noises: list[Tensor] = []
        for name, seen in self.seen.items():
            table = plans[name].table
            if not table.quantised or seen.x is None or seen.w is None or seen.dy is None:
                continue
            measured: dict[object, tuple[Tensor, Decoded, bool]] = {}
            decoded: dict[str, Decoded] = {}
            samples = {"x": seen.x, "w": self._fused(seen.w, plans[name]), "dy": seen.dy}
            for number, ((gemm, tensor), operand) in enumerate(sourced(table).items()):
                of_codes = operand.codes
                if of_codes is None:
                    continue
                spec = of_codes.spec
                codes = tensor, of_codes if spec.random else operand.shared
                if codes not in measured:
                    statistics, values = _statistics(
                        samples[tensor], spec, key, transposed=operand.transposed
                    )
                    measured[codes] = statistics, values, operand.transposed
                statistics, values, transposed = measured[codes]
                if operand.spec is not None:
                    rows.append(statistics)
                    at.append((len(layers), number))
                elif gemm == "wgrad":  # values of codes that another GEMM multiplies
                    values = Decoded(values.tensor(torch.float32), None)
                if gemm == "wgrad":
                    if transposed != operand.transposed:
                        values = Decoded(values.values.T, values.scale)
                    decoded[tensor] = values
            noises.append(_noise(seen.dy.rows, seen.x.rows, decoded))
            layers.append(name)
        tokens = max(
            (seen.x.rows.shape[0] for seen in self.seen.values() if seen.x is not None), default=0
        )
        if rows:
            stacked = torch.stack(rows)
        else:
            stacked = torch.zeros(0, len(RAW), dtype=torch.float64)
        if noises:
            noise = torch.stack(noises)
        else:
            noise = torch.zeros(0, dtype=torch.float64)
        return Measured(layers=layers, at=at, values=stacked, noise=noise, tokens=tokens)

    def _fused(self, weight: Sample, plan: LayerPlan) -> Sample:
        """A weight's sample with the amax that its scale is made of: the largest of the weights
        that share one.
        """
        amaxes = [
            seen.w.amax
            for name in plan.fused
            if (seen := self.seen.get(name)) and seen.w is not None
        ]
        if amaxes:
            return replace(weight, amax=torch.stack(amaxes).amax())
        return weight


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Statistics on the device.

    Args:
        layers: names of the layers that have a quantised operand.
        at: (index of the layer, index in `NAMES`) of each row of `values`.
        values: float64 [rows, len(RAW)].
        noise: norm of the error of each layer's weight gradient on the sampled tokens, float64
            [layers].
        tokens: number of sampled tokens.
    """

    layers: list[str]
    at: list[tuple[int, int]]
    values: Tensor
    noise: Tensor
    tokens: int


def sample(tensor: Tensor) -> Sample:
    """`GROUPS` groups of 128 rows of [R, C], evenly spaced; all of it if it has no more. It is
    copied.
    """
    tensor = tensor.detach()
    amax = torch.maximum(tensor.amax(), -tensor.amin()).float()
    rows = tensor.shape[0]
    if rows <= GROUPS * GROUP:
        return Sample(tensor.clone(), amax)
    stride = (rows - GROUP) // (GROUPS - 1) // GROUP * GROUP
    return Sample(torch.cat([tensor[i * stride : i * stride + GROUP] for i in range(GROUPS)]), amax)


def _statistics(
    of: Sample, spec: QuantSpec, key: RandomKey, *, transposed: bool
) -> tuple[Tensor, Decoded]:
    """(`RAW` as float64, the decoded values) of a sample, or of its transpose."""
    x_RC = of.rows.T if transposed else of.rows
    takes_amax = spec.hadamard is None and spec.requantises is None
    takes_amax = takes_amax and (spec.global_scale == "tensor" or spec.block == (None, None))
    quantize = quantizer(spec, x_RC.device.type)
    q = quantize.codes(x_RC, key if spec.random else None, of.amax if takes_amax else None)
    decoded = quantize.decode(q)
    x = x_RC
    if spec.hadamard is not None:
        x = transform(x_RC, spec.hadamard, key)
    x = x.float()
    y = _values(decoded)
    magnitude = x.abs()
    clipped = (magnitude > largest_values(q)).sum()
    nonzero = magnitude.count_nonzero()
    lost = nonzero - torch.logical_and(x, y).sum()
    unit = 1.0 / torch.where(of.amax > 0, of.amax, 1.0)
    x = x * unit
    error = (y * unit).sub_(x).square_().mean()
    signal = x.square().mean()
    centred = x.sub_(x.mean()).square_()
    scales = q.block_scales()
    stored = q.scales.flatten()
    at_most = scales.amax()
    if stored.dtype == torch.uint8:
        codes = stored.bincount(minlength=256).count_nonzero()
    else:
        codes = at_most * 0
    at_least = torch.where(scales > 0, scales, torch.inf).amin()
    raw = [
        of.amax,
        signal,
        error,
        centred.mean(),
        centred.square_().mean(),
        clipped,
        nonzero,
        lost,
    ]
    raw += [torch.full_like(signal, x.numel()), codes, at_least, at_most]
    return torch.stack([number.double() for number in raw]), decoded


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


def _noise(
    dy_TN: Tensor,
    x_TK: Tensor,
    decoded: Mapping[str, Decoded],
) -> Tensor:
    """Norm of the error of dyᵀ·x on the sampled tokens, float64 0-d; zero where neither operand is
    quantised.

    Args:
        decoded: the operands that are other values than dyᵀ [N, T] and xᵀ [K, T], by tensor.
    """
    dy = dy_TN.float().T
    x = x_TK.float()
    if not decoded:
        return torch.zeros((), dtype=torch.float64, device=dy.device)
    a = _values(decoded["dy"]) if "dy" in decoded else dy
    b = _values(decoded["x"]) if "x" in decoded else x.T
    noise: Tensor = (a @ b.T - dy @ x).norm()
    return noise.double()


def _values(decoded: Decoded) -> Tensor:
    if decoded.scale is None:
        return decoded.values.float()
    return decoded.values.float() * decoded.scale


@contextmanager
def watch(layers: Iterable[tuple[Layer, PlannedLayer]]) -> Iterator[WatchedLayers]:
    """Sample the tensors of `layers`: of the first forward pass of each, and of its backward
    pass.
    """
    watched = WatchedLayers()

    def enter(seen: Seen, module: PlannedLayer, args: tuple[Any, ...], output: Tensor) -> None:
        if seen.hooked:
            return
        if seen.x is None:
            x_MK, w_NK, seen.rows = module.sampled_operands(*args)
            # Before the optimizer, and while it is whole: sharded weights are gathered for the
            # layer's call only.
            seen.w = sample(w_NK)
            if not len(x_MK[seen.rows]):
                return
            seen.x = sample(x_MK[seen.rows])
        if output.requires_grad:
            seen.hooked = True
            output.register_hook(partial(leave, seen))  # type: ignore[no-untyped-call]

    def leave(seen: Seen, grad: Tensor) -> None:
        if seen.dy is None:
            seen.dy = sample(grad.reshape(-1, grad.shape[-1])[seen.rows])

    handles = []
    for layer, module in layers:
        seen = watched.seen[layer.name] = Seen()
        handles.append(module.register_forward_hook(partial(enter, seen)))
    try:
        yield watched
    finally:
        for handle in handles:
            handle.remove()
