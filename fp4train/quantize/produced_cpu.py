"""Norms and gates on CPUs, for `nn/produced.py`: what torch's operators give, in every bit, in one pass each way.

torch's operators make [M, K] in float32 a dozen times for a norm and its gradients. The C kernels (csrc/fused.h) keep a
row in the cache. They round where torch rounds and add the squares of a row in torch's order; the sum over tokens, for
the gradient of a norm's weight, is left to torch. `why_not` compares both on this machine before they are used: another
release of torch may add in another order, or have another exponential.

torch computes the exponential of what does not fill two vectors of a thread's share by another function, which differs
in one of 560 numbers of BF16. `whole_vectors` says whether a tensor has such a rest: its gate is torch's.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.kernels import cpu

if TYPE_CHECKING:
    from fp4train.quantize.produced import SourceTensors

_GRAIN: Final = 1 << 15
"""Elements of a thread's share that torch starts another thread for (at::internal::GRAIN_SIZE)."""
_VECTORS: Final = 64
"""Elements of two vectors of BF16 at most; the kernels take half as many at a time."""
_PROBES: Final = 32
"""Rows of random numbers on which a norm is compared."""


def why_not(kind: str, width: int) -> str | None:
    """Why the kernels do not run for a source of this kind, of rows of `width` features; None: they do."""
    if kind not in cpu.FUSED_KINDS:
        return f"the C kernels make no {kind}"
    if width % _VECTORS:
        return f"{width} features are no multiple of {_VECTORS}"
    if kind == "norm" and width >= _GRAIN:
        return f"{width} features of one token are added by several threads"
    if cpu.instruction_sets()[-1] == "plain":
        return "the C kernels of norms and gates need AVX2 and FMA"
    exact = _norm_is_torchs(width) if kind == "norm" else _gate_is_torchs()
    return None if exact else f"torch {torch.__version__} rounds otherwise here than the C kernels"


def whole_vectors(elements: int) -> bool:
    """Whether each thread's share of so many elements fills pairs of vectors in torch's operators."""
    shares = min(torch.get_num_threads(), -(-elements // _GRAIN))
    return elements % _VECTORS == 0 and -(-elements // shares) % _VECTORS == 0


def values(source: SourceTensors, machine: cpu.Machine = cpu.HERE) -> tuple[Tensor, ...]:
    """x in BF16, or both gradients, of `source`, whose tensors are contiguous; of a norm rstd is filled."""
    first = source.tensors[0]
    made = tuple(torch.empty_like(first) for _ in range(source.results))
    if source.kind == "norm":
        h_MK, weight_K, rstd_M = source.tensors
        cpu.fused("norm", (h_MK, weight_K.bfloat16().contiguous(), *made, rstd_M), h_MK.shape, source.eps, machine)
    else:
        shape = (first.numel() // _VECTORS, _VECTORS)
        cpu.fused(source.kind, (*source.tensors, *made), shape, machine=machine)
    return made


def norm_backward(
    dy_MK: Tensor, h_MK: Tensor, weight_K: Tensor, rstd_M: Tensor, machine: cpu.Machine = cpu.HERE
) -> tuple[Tensor, Tensor]:
    """(dh [M, K], dweight [K]) in BF16, where `values` made rstd."""
    dh_MK, products_MK = torch.empty_like(h_MK), h_MK.new_empty(h_MK.shape, dtype=torch.float32)
    tensors = (dy_MK, h_MK, weight_K.bfloat16().contiguous(), rstd_M, dh_MK, products_MK)
    cpu.fused("norm_gradients", tensors, h_MK.shape, machine=machine)
    return dh_MK, products_MK.sum(0).bfloat16()


def _same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True))


def _random(*shape: int) -> Tensor:
    """Numbers of many magnitudes, which do not depend on torch's generator, in BF16."""
    generator = torch.Generator("cpu").manual_seed(shape[-1])
    spread = torch.randn(shape[0], 1, generator=generator, device="cpu").exp()
    return (torch.randn(shape, generator=generator, device="cpu") * spread).bfloat16()


@cache
def _norm_is_torchs(width: int) -> bool:
    from fp4train.quantize.produced import SourceTensors

    h, dy, weight = (_random(rows, width) for rows in (_PROBES, 2 * _PROBES, 1))
    h, weight, dy = h.requires_grad_(), weight[0].requires_grad_(), dy[_PROBES:]
    unhooked = torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each)
    with torch.enable_grad(), unhooked:  # in a region that is recomputed, whose saved tensors are counted
        x = F.rms_norm(h, (width,), weight, 1e-5)
        theirs = x.detach(), *torch.autograd.grad((x * dy).sum(), (h, weight))  # given dy it would load sympy
    inputs = h.detach(), weight.detach(), torch.empty(_PROBES, dtype=torch.float32, device="cpu")
    ours = *values(SourceTensors("norm", inputs, 1e-5)), *norm_backward(dy, inputs[0], inputs[1], inputs[2])
    return _same(ours, theirs)


@cache
def _gate_is_torchs() -> bool:
    """For every gate in BF16."""
    from fp4train.quantize.produced import SourceTensors

    gate = torch.arange(-(2**15), 2**15, device="cpu").to(torch.int16).view(256, 256).view(torch.bfloat16)
    up, dh = _random(256, 256), _random(512, 256)[256:]
    with torch.no_grad():
        silu = F.silu(gate)
        theirs = silu * up, torch.ops.aten.silu_backward(dh * up, gate), silu * dh
    ours = values(SourceTensors("gate", (gate, up))), values(SourceTensors("gradients", (dh, gate, up)))
    return _same((*ours[0], *ours[1]), theirs)
