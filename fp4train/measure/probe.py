"""Quantisation errors in a real run: the error of every operand of every layer at one step.

Hooks record x [M, K] and dy [M, N] of each linear layer in one forward and backward pass. With the weight they give the
six operands; each is compared with its quantised values.
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
    """The tensors of one layer: weight, input [M, K] and output gradient [M, N]."""

    layer: Layer
    weight: Tensor
    x_MK: Tensor | None = None
    dy_MN: Tensor | None = None


@dataclass
class Probe:
    """The tensors recorded while `probe` was active, by layer name."""

    seen: dict[str, Seen] = field(default_factory=dict)

    def measure(self, plans: Mapping[str, LayerPlan], *, key: RandomKey) -> dict[str, float]:
        """Error metrics as "error/LAYER/GEMM.OPERAND/METRIC" → value, of quantised operands.

        Args:
            plans: the plans of the layers, by name.
            key: key of stochastic rounding; a sample of its noise, with other bits than the step itself used.
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
    """Record the tensors of `layers` during one forward and backward pass.

    With several passes (microbatches) the last one is kept.
    """
    probing = Probe()

    def enter(seen: Seen, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        # Before the step, and while it is whole: sharded weights are gathered for the layer's call only.
        seen.weight = seen.weight if seen.x_MK is not None else module.weight.detach().clone()  # type: ignore[operator]
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
