"""One call of a layer as it was observed: its tensors, and both operands of each product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fp4train.audits.cut import CutCall
from fp4train.backends import Prepared
from fp4train.precision.layer_plan import LayerPlan
from fp4train.quantize import Decoded, Position, Quantized


def kept(tensor: Tensor) -> Tensor:
    """A copy of a tensor in main memory, where the reference computes: nothing stays on a GPU."""
    return tensor.detach().to("cpu", copy=True)


def kept_or_none(tensor: Tensor | None) -> Tensor | None:
    """`kept`; None of None."""
    return None if tensor is None else kept(tensor)


@dataclass
class Product:
    """One product that a backend computed: left [R, C] · right [S, C]ᵀ + bias [S].

    joined: whether other products are added within it (`nn.executors.joined`).
    earlier_sum: the float32 sum to which it was added; None: it stands alone.
    elsewhere: whether another device than a CPU computed it, or kernels that are not fp4train's.
    capability: compute capability of the GPU that computed it; None: none did.
    backend: name of the layer backend that computed it; None: the plan names the backend.
    """

    left: Prepared
    right: Prepared
    result: Tensor
    bias: Tensor | None = None
    earlier_sum: Tensor | None = None
    elsewhere: bool = False
    capability: tuple[int, int] | None = None
    backend: str | None = None
    joined: bool = False

    def kept(self) -> Product:
        """A copy in main memory, which says where the product was computed."""
        return replace(
            self,
            left=_kept_operand(self.left),
            right=_kept_operand(self.right),
            result=kept(self.result),
            bias=kept_or_none(self.bias),
            earlier_sum=kept_or_none(self.earlier_sum),
            elsewhere=self.elsewhere or self.result.device.type != "cpu",
            capability=self.capability or _capability(self.result),
        )


def _capability(result: Tensor) -> tuple[int, int] | None:
    if result.device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(result.device)


def _kept_operand(operand: Prepared) -> Prepared:
    if isinstance(operand, Quantized):
        tensors = map(kept_or_none, operand[2:])
        return Quantized(operand.spec, operand.shape, *tensors)  # type: ignore[arg-type]
    return _kept_decoded(operand)


def _kept_decoded(operand: Decoded) -> Decoded:
    return Decoded(kept(operand.values), kept_or_none(operand.scale))


@dataclass
class ObservedCall:
    """One call of a layer with its backward pass. All its tensors are copies in main memory.

    Args:
        name: name that keys the random bits; of an expert that of the group and its number.
        plan: the plan that the executor ran.
        position: position that keyed the random bits; None: nothing drew any.
        place: place of the weight in its group, on whatever ranks its members are.
        x: [M, K]; None where it is made within the call.
        w: [N, K]; None where it is gathered.
        bias: [N]; None where there is none.
        y: [M, N]; dy, dx, dw: its gradients, None until backward, or where they are not wanted.
        dw_before: float32 sum that dw was added to, which dw holds then; None: dw stands alone.
        products: GEMM → what the backend multiplied; none in high precision by torch.
        means: x or dy → mean of its tokens that is taken out, float32 [columns].
        scaling: tensors of the layer's delayed scaling before the step.
        fused: weights that share a global scale with w, or their amaxes.
        returned: whether its backward pass has run, with a dy or without.
        channels: numbers of the in features of a part of the layer, int64; None: it has all.
        first_feature: number of its first in feature, for random bits.
        first_out: number of its first out feature, for random bits.
        unseen: GEMM → why neither its product nor its result is seen.
        cut: tensors and terms of the other ranks, of a layer that tensor parallelism cuts.
    """

    name: str
    plan: LayerPlan
    position: Position | None
    x: Tensor | None
    w: Tensor | None
    bias: Tensor | None
    place: int = 0
    y: Tensor | None = None
    dy: Tensor | None = None
    dx: Tensor | None = None
    dw: Tensor | None = None
    dw_before: Tensor | None = None
    products: dict[str, Product] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)
    scaling: dict[str, Tensor] = field(default_factory=dict)
    fused: Sequence[Tensor] = ()
    returned: bool = False
    channels: Tensor | None = None
    first_feature: int = 0
    first_out: int = 0
    unseen: dict[str, str] = field(default_factory=dict)
    cut: CutCall | None = None

    def result(self, gemm: str) -> Tensor | None:
        """What the layer returned of a GEMM: y, dx or dw."""
        results = {"fprop": self.y, "dgrad": self.dx, "wgrad": self.dw}
        return results[gemm]

    def sources(self) -> ObservedCall:
        """What operands are made of: the call without products and results."""
        return replace(self, y=None, dx=None, dw=None, dw_before=None, products={})

    def forget(self, *gemms: str) -> None:
        """Forget the products of GEMMs that are computed anew."""
        for gemm in gemms:
            self.products.pop(gemm, None)

    @property
    def complete(self) -> bool:
        """Whether its backward pass has run."""
        return self.returned or self.dy is not None
