"""Quantisation errors inside a real run: for each layer and operand, what quantising cost at one step.

Hooks take the tensors of one forward and backward pass, x [M, K] and dy [M, N], as they reach each linear layer; with
the weight they make the six operands, and each is measured against its quantised self.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from fp4train.backends import OPERANDS
from fp4train.measure.metrics import measure
from fp4train.precision.layers import Layer
from fp4train.precision.plan import LayerPlan
from fp4train.quantize import RandomKey


@dataclass
class Seen:
    """What one layer saw: its place, weight, input [M, K] and output gradient [M, N]."""

    layer: Layer
    weight: Tensor
    x_MK: Tensor | None = None
    dy_MN: Tensor | None = None


@dataclass
class Probe:
    """The layers seen while `probe` was active, by name."""

    seen: dict[str, Seen] = field(default_factory=dict)

    def measure(self, plans: Mapping[str, LayerPlan], *, key: RandomKey) -> dict[str, float]:
        """Error metrics as "error/LAYER/GEMM.OPERAND/METRIC" → value, of quantised operands.

        Args:
            plans: what the layers ran, by name.
            key: of stochastic rounding; a sample of the noise, not the bits that the step itself drew.
        """
        found: dict[str, float] = {}
        for name, seen in self.seen.items():
            for gemm, operands in plans[name].table.items():
                tensors = self._tensors(seen, gemm)
                for operand, spec, tensor in zip(
                    OPERANDS[gemm], (operands.first, operands.second), tensors, strict=True
                ):
                    if spec is None or tensor is None:
                        continue
                    amax = tensor.abs().amax().float() if spec.delayed else None
                    for metric, value in measure(tensor, spec, key=key, amax=amax):
                        found[f"error/{name}/{gemm}.{operand}/{metric}"] = float(value)
        return found

    @staticmethod
    def _tensors(seen: Seen, gemm: str) -> tuple[Tensor | None, Tensor | None]:
        """The two operands of a GEMM before quantisation, each blocked along its last axis."""
        dy, x, w = seen.dy_MN, seen.x_MK, seen.weight.detach()
        if gemm == "fprop":
            return x, w
        if gemm == "dgrad":
            return dy, w.T
        return None if dy is None else dy.T, None if x is None else x.T


@contextmanager
def probe(layers: Iterable[tuple[Layer, nn.Module]]) -> Iterator[Probe]:
    """Watch the linear `layers` during one forward and backward pass.

    With several passes (microbatches) the last one is kept.
    """
    probing = Probe()

    def enter(seen: Seen, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.weight = seen.weight if seen.x_MK is not None else seen.weight.detach().clone()  # as it is before the step
        seen.x_MK = args[0].detach().reshape(-1, args[0].shape[-1])
        if output.requires_grad:
            output.register_hook(partial(leave, seen))  # type: ignore[no-untyped-call]

    def leave(seen: Seen, grad: Tensor) -> None:
        seen.dy_MN = grad.detach().reshape(-1, grad.shape[-1])

    handles = []
    for layer, module in layers:
        seen = Seen(layer=layer, weight=module.weight)  # type: ignore[arg-type]
        probing.seen[layer.name] = seen
        handles.append(module.register_forward_hook(partial(enter, seen)))
    try:
        yield probing
    finally:
        for handle in handles:
            handle.remove()
