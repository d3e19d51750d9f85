"""Norms, gates and rotations in C kernels, on CPUs: what torch's operators give, in every bit, in
one pass each way.

torch's operators make [M, K] in float32 a dozen times for a norm and its gradients, and pass five
times over heads to rotate them. The C kernels (csrc/fused.h) keep a row in the cache. They round
where torch rounds and add the squares of a row in torch's order; the sum over tokens, for the
gradient of a norm's weight, is left to torch. `why_not` compares both on this machine before they
are used: another release of torch may add in another order, or have another exponential.

torch computes the exponential of what does not fill two vectors of a thread's share by another
function, which differs in one of 560 numbers of BF16. `whole_vectors` says whether a tensor has
such a rest: its gate is torch's.

Gradients that are to be differentiated again are torch's.

| part | bytes per BF16 element, forward + backward | least |
|---|---|---|
| norm | 4 + 14 | 4 + 6 |
| silu(gate) ⊙ up | 6 + 10 | 6 + 10 |
| rotation | 4 + 8 | 4 + 4 |

Each input is read once and each result written once, beside a norm's weight and the angles, which
stay in the cache; gates and rotations in float32 take twice as many. Backward a norm takes 2.3
times the least: torch's sum over tokens, whose order of additions counts, reads products in float32
that are written for it (4 + 4). A rotation takes twice the least: torch's attention gives the
gradient head by head, and it is first copied to lie token by token (4).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4train.kernels import cpu
from fp4train.models.common.operators import OF_TORCH, Operators, rotate
from fp4train.quantize.quantizer import PLAIN

_GRAIN = 1 << 15
"""Elements of a thread's share that torch starts another thread for (at::internal::GRAIN_SIZE)."""
_VECTORS = 64
"""Elements of two vectors of BF16 at most; the kernels take half as many at a time."""
_PROBES = 32
"""Rows of random numbers on which a norm is compared."""


def why_not(kind: str, width: int, dtype: torch.dtype) -> str | None:
    """Why the kernels make no "norm", "gate" or "rotation" of rows of `width` features; None: they
    do.
    """
    if (missing := cpu.unavailable()) is not None:
        return missing
    if kind == "norm" and dtype is torch.float32:
        return "in float32 torch adds two parts of a norm's gradient to those of others one by one"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"activations are {str(dtype).removeprefix('torch.')}"
    if kind != "gate" and width % _VECTORS:
        return f"{width} features are no multiple of {_VECTORS}"
    if kind == "norm" and width >= _GRAIN:
        return f"{width} features of one token are added by several threads"
    if cpu.instruction_sets()[-1] == "plain":
        return "the C kernels need AVX2 and FMA"
    if kind == "norm":
        exact = _norm_is_torchs(width)
    else:
        exact = _CHECKS[kind](dtype)
    if exact:
        return None
    return f"torch {torch.__version__} rounds otherwise here than the C kernels"


def whole_vectors(elements: int) -> bool:
    """Whether each thread's share of so many elements fills pairs of vectors in torch's
    operators.
    """
    shares = min(torch.get_num_threads(), -(-elements // _GRAIN))
    return elements % _VECTORS == 0 and -(-elements // shares) % _VECTORS == 0


class CpuOperators(Operators):
    """The C kernels; torch's operators in a call that they do not take."""

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
        """See `Operators`."""
        if eps is None or weight_D.shape != x.shape[-1:] or not _take("norm", x, weight_D):
            return super().rms_norm(x, weight_D, eps)
        y: Tensor = _Norm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
        return y

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Operators`."""
        contiguous = gate.is_contiguous() and up.is_contiguous() and gate.shape == up.shape
        if not contiguous or not _take("gate", gate, up) or not whole_vectors(gate.numel()):
            return super().silu_product(gate, up)
        y: Tensor = _Gate.apply(gate, up)  # type: ignore[no-untyped-call]
        return y

    def rotate(
        self, q_BHTE: Tensor, k_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Operators`."""
        alike = cos_TE.shape == sin_TE.shape == q_BHTE.shape[-2:] == k_BHTE.shape[-2:]
        alike = (
            alike
            and q_BHTE.dim() == k_BHTE.dim() == 4
            and not (cos_TE.requires_grad or sin_TE.requires_grad)
        )
        if not alike or not _take("rotation", q_BHTE, k_BHTE, cos_TE, sin_TE):
            return super().rotate(q_BHTE, k_BHTE, cos_TE, sin_TE)
        angles = cos_TE.contiguous(), sin_TE.contiguous(), "rotation"
        q, k = (_Rotation.apply(x, *angles) for x in (q_BHTE, k_BHTE))  # type: ignore[no-untyped-call]
        return q, k


def _take(kind: str, *tensors: Tensor) -> bool:
    """Whether the kernels take these tensors, the last dimension of which is that of the first."""
    x = tensors[0]
    return (
        not torch.compiler.is_compiling()
        and all(
            type(tensor) in PLAIN and tensor.device.type == "cpu" and tensor.dtype is x.dtype
            for tensor in tensors
        )
        and x.dim() > 0 < x.numel()
        and not torch.is_autocast_enabled("cpu")
        and why_not(kind, x.shape[-1], x.dtype) is None
    )


def _matrix(x: Tensor) -> Tensor:
    """[M, K], contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def norm(
    h_MK: Tensor, weight_K: Tensor, eps: float, machine: cpu.Machine = cpu.HERE
) -> tuple[Tensor, Tensor]:
    """(RMSNorm of h, 1 / √(mean(h²) + ε) of each row in float32) of contiguous tensors in BF16."""
    x_MK = torch.empty_like(h_MK)
    rstd_M = h_MK.new_empty(h_MK.shape[0], dtype=torch.float32)
    cpu.fused("norm", (h_MK, weight_K, x_MK, rstd_M), h_MK.shape, eps, machine=machine)
    return x_MK, rstd_M


def norm_gradients(
    dy_MK: Tensor, h_MK: Tensor, weight_K: Tensor, rstd_M: Tensor, machine: cpu.Machine = cpu.HERE
) -> tuple[Tensor, Tensor]:
    """(dh [M, K], what the gradient of the weight is the sum of over M, in float32)."""
    dh_MK = torch.empty_like(h_MK)
    products_MK = h_MK.new_empty(h_MK.shape, dtype=torch.float32)
    tensors = (dy_MK, h_MK, weight_K, rstd_M, dh_MK, products_MK)
    cpu.fused("norm_gradients", tensors, h_MK.shape, machine=machine)
    return dh_MK, products_MK


def gate_kernel(kind: str, *tensors: Tensor, machine: cpu.Machine = cpu.HERE) -> tuple[Tensor, ...]:
    """(silu(gate) ⊙ up,) of "gate": (gate, up); (dgate, dup) of "gate_gradients": (dh, gate, up);
    they are contiguous, of a number of elements that 64 divides.
    """
    outputs = tuple(
        torch.empty_like(tensors[0]) for _ in range(2 if kind == "gate_gradients" else 1)
    )
    cpu.fused(
        kind, (*tensors, *outputs), (outputs[0].numel() // _VECTORS, _VECTORS), machine=machine
    )
    return outputs


def rotated(kind: str, x_BHTE: Tensor, *angles: Tensor, machine: cpu.Machine = cpu.HERE) -> Tensor:
    """x rotated, by "rotation"; the gradient of x, from that of the rotated, by
    "rotation_gradients".

    Args:
        angles: cosines and sines [T, E].
    """
    x_BTHE = x_BHTE.transpose(1, 2).contiguous()
    batch, time, heads, width = x_BTHE.shape
    y_BTHE = torch.empty_like(x_BTHE)
    shape = (batch * time * heads, width)
    cpu.fused(kind, (x_BTHE, *angles, y_BTHE), shape, heads=heads, time=time, machine=machine)
    return y_BTHE.transpose(1, 2)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        x_MK, rstd_M = norm(_matrix(h), weight_K.contiguous(), eps)
        ctx.save_for_backward(h, weight_K, rstd_M)
        ctx.eps = eps
        return x_MK.view(h.shape).detach()  # no view, which could not be written in place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, weight_K, rstd_M = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(
                lambda h, weight_K: OF_TORCH.rms_norm(h, weight_K, ctx.eps), (h, weight_K), dy
            ), None
        dh_MK, products_MK = norm_gradients(_matrix(dy), _matrix(h), weight_K.contiguous(), rstd_M)
        return (
            dh_MK.view(h.shape),
            products_MK.sum(0).bfloat16() if ctx.needs_input_grad[1] else None,
            None,
        )


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate_kernel("gate", gate, up)[0]

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(OF_TORCH.silu_product, (gate, up), dh)
        return gate_kernel("gate_gradients", dh.contiguous(), gate, up)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(cos_TE, sin_TE)
        if kind == "rotation_gradients":
            ctx.back = "rotation"
        else:
            ctx.back = "rotation_gradients"
        return rotated(kind, x_BHTE, cos_TE, sin_TE).detach()

    @staticmethod
    def backward(ctx: Any, dy_BHTE: Tensor) -> tuple[Tensor | None, ...]:
        return _Rotation.apply(dy_BHTE, *ctx.saved_tensors, ctx.back), None, None, None  # type: ignore[no-untyped-call]


def _differentiable(
    operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that are to be differentiated again: those of torch's operators."""
    with torch.enable_grad():
        views = [view.view_as(view) for view in inputs]  # of which one does not depend on another
        y = operation(*views)
    gradients = iter(
        torch.autograd.grad(
            y, [view for view in views if view.requires_grad], dy, create_graph=True
        )
    )
    return tuple(next(gradients) if view.requires_grad else None for view in views)


def _same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True)
    )


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers of many magnitudes, which do not depend on torch's generator."""
    with torch.inference_mode(False):  # autograd saves what is made of them
        generator = torch.Generator("cpu").manual_seed(shape[-1])
        spread = torch.randn(*shape[:-1], 1, generator=generator, device="cpu").exp()
        return (torch.randn(shape, generator=generator, device="cpu") * spread).to(dtype)


def _with_gradients(
    operation: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor, ...]:
    """(y, gradients of the inputs) of torch's operators."""
    unhooked = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor
    )
    # in a region that is recomputed, say
    with torch.inference_mode(False), torch.enable_grad(), unhooked:
        inputs = tuple(tensor.clone().requires_grad_() for tensor in inputs)
        y = operation(*inputs)
        # given dy it would load sympy
        return y.detach(), *torch.autograd.grad((y * dy).sum(), inputs)


@cache
def _norm_is_torchs(width: int) -> bool:
    h, dy = _random(2 * _PROBES, width).chunk(2)
    weight = _random(1, width)[0]
    x, rstd = norm(h, weight, 1e-5)
    dh, products = norm_gradients(dy, h, weight, rstd)
    theirs = _with_gradients(lambda h, weight: OF_TORCH.rms_norm(h, weight, 1e-5), (h, weight), dy)
    return _same((x, dh, products.sum(0).bfloat16()), theirs)


@cache
def _gate_is_torchs(dtype: torch.dtype) -> bool:
    """For every gate in BF16, and in float32 as many."""
    gate = (
        torch.arange(-(2**15), 2**15, device="cpu")
        .to(torch.int16)
        .view(256, 256)
        .view(torch.bfloat16)
        .to(dtype)
    )
    if dtype is not torch.bfloat16:
        gate = gate * 1.2345678
    up, dh = _random(512, 256, dtype=dtype).chunk(2)
    ours = *gate_kernel("gate", gate, up), *gate_kernel("gate_gradients", dh, gate, up)
    return _same(ours, _with_gradients(OF_TORCH.silu_product, (gate, up), dh))


@cache
def _rotation_is_torchs(dtype: torch.dtype) -> bool:
    x, dy = _random(2, 2, 3, 5, _VECTORS, dtype=dtype)
    angles = tuple(_random(2, 5, _VECTORS, dtype=dtype))
    ours = rotated("rotation", x, *angles), rotated("rotation_gradients", dy, *angles)
    return _same(ours, _with_gradients(lambda x: rotate(x, *angles), (x,), dy))


_CHECKS = {"gate": _gate_is_torchs, "rotation": _rotation_is_torchs}
