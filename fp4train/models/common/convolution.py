"""Causal convolutions of single channels over time: y_t = Σ_s h_s ⊙ x_{t−s}.

Short filters are shifted products, which a CPU multiplies faster than torch's `conv1d`. Longer
ones, up to as long as the sequence, go through a Fourier transform of at least T + K − 1 places, so
that nothing wraps around: O(T·log T) operations. A long filter may be implicit, a sum of
exponentials (arXiv:2310.18780):

    h_t = Σ_n residue_n · exp(log_pole_n · t)

which is also the recurrence state_t = exp(log_pole) ⊙ state_{t−1} + x_t, y_t = Σ_n residue_n ·
state_{n,t}. What is computed here is float32: no recipe quantises it.

Dimensions: B batch, T time, C channels, K taps, N poles.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def first_of_document(mask_BTT: Tensor | None) -> Tensor | None:
    """The position at which the document of each token begins, int [B, T], from what each token
    sees, bool [B, 1, T, T]; None: all tokens are of one document.
    """
    if mask_BTT is None:
        return None
    return mask_BTT[:, 0].int().argmax(-1)


def short_convolution(
    x_BTC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    *,
    window_BKC: Tensor | None = None,
    document_BT: Tensor | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """(y [B, T, C], the last K − 1 inputs); the last column of the weight multiplies the token
    itself.

    Args:
        window_BKC: the K − 1 inputs before x; None: zeros.
        document_BT: the position at which each token's document begins; a token sees none of
            another. None: all are of one.
        first: position of the first token of x.
    """
    kernel = weight_CK.shape[-1]
    time = x_BTC.shape[1]
    all_BSC = with_window(x_BTC, window_BKC, kernel)
    if bias_C is None:
        y = weight_CK[:, -1] * x_BTC
    else:
        y = bias_C + weight_CK[:, -1] * x_BTC
    for back in range(1, kernel):
        tap = kernel - 1 - back
        term = weight_CK[:, tap] * all_BSC[:, tap : tap + time]
        if document_BT is not None:
            seen = torch.arange(first - back, first - back + time, device=x_BTC.device)
            term = term * (document_BT <= seen)[..., None]
        y = y + term
    return y, all_BSC[:, time:]


def with_window(x_BTC: Tensor, window_BKC: Tensor | None, kernel: int) -> Tensor:
    """x after the `kernel` − 1 inputs before it; None: zeros."""
    if window_BKC is None:
        return F.pad(x_BTC, (0, 0, kernel - 1, 0))
    return torch.cat((window_BKC, x_BTC), 1)


def long_convolution(x_BTC: Tensor, filter_CK: Tensor, document_BT: Tensor | None = None) -> Tensor:
    """y [B, T, C] by Fourier transforms; the first column of the filter multiplies the token
    itself.

    Args:
        filter_CK: taps of any number; those beyond T change nothing.
        document_BT: begin of every token's document; a token sees none of another document.
    """
    if document_BT is not None:
        return _by_document(lambda part: long_convolution(part, filter_CK), x_BTC, document_BT)
    y: Tensor = _Convolve.apply(x_BTC, filter_CK[:, : x_BTC.shape[1]])  # type: ignore[no-untyped-call]
    return y


def transformed(time: int, kernel: int) -> float:
    """Multiplications per token and channel of `long_convolution`: two transforms of n places,
    1.25·n·log₂ n each.

    That of the filter, once per microbatch, is not counted.
    """
    size = _places(time + min(kernel, time) - 1)
    return 2.5 * size * math.log2(size) / time


def modal_filter(log_poles_CN: Tensor, residues_CN: Tensor, time: int) -> Tensor:
    """The first `time` taps [C, T] of the filter with these poles and residues.

    The exponentials of one pole at a time are held, and computed again for the gradient.
    """
    h: Tensor = _Modal.apply(log_poles_CN, residues_CN, time)  # type: ignore[no-untyped-call]
    return h


def modal_state(x_BTC: Tensor, log_poles_CN: Tensor, state_BCN: Tensor | None) -> Tensor:
    """The state [B, C, N] of the recurrence after x; `state_BCN`: before it, None: zeros."""
    time = x_BTC.shape[1]
    ages = torch.arange(time - 1, -1, -1, device=x_BTC.device, dtype=log_poles_CN.dtype)
    after = torch.einsum("btc,cnt->bcn", x_BTC, (log_poles_CN[..., None] * ages).exp())
    if state_BCN is None:
        return after
    return after + (log_poles_CN * time).exp() * state_BCN


def modal_rest(state_BCN: Tensor, log_poles_CN: Tensor, residues_CN: Tensor, time: int) -> Tensor:
    """Contribution of the state to the `time` tokens after it, [B, T, C]."""
    ages = torch.arange(1, time + 1, device=state_BCN.device, dtype=log_poles_CN.dtype)
    return torch.einsum(
        "bcn,cnt->btc", state_BCN * residues_CN, (log_poles_CN[..., None] * ages).exp()
    )


def _places(least: int) -> int:
    """The places of a transform: at least `least`, with no factor above 7, which libraries
    transform fast.
    """
    step = 1 << max(0, least.bit_length() - 3)
    return -(-least // step) * step


class _Convolve(torch.autograd.Function):
    """The gradient of a convolution is a correlation: conj(H)·dY for x, conj(X)·dY summed over the
    batch for the filter. The transforms are computed again for it, as they take more memory than
    what they transform.
    """

    @staticmethod
    def forward(ctx: Any, x_BTC: Tensor, filter_CK: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTC, filter_CK)
        time = x_BTC.shape[1]
        kernel = filter_CK.shape[1]
        size = _places(time + kernel - 1)
        product = torch.fft.rfft(x_BTC.mT, n=size) * torch.fft.rfft(filter_CK, n=size)
        y: Tensor = torch.fft.irfft(product, n=size)
        return y[..., :time].mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor) -> tuple[Tensor, Tensor]:
        x_BTC, filter_CK = ctx.saved_tensors
        time = x_BTC.shape[1]
        kernel = filter_CK.shape[1]
        size = _places(time + kernel - 1)
        dy = torch.fft.rfft(dy_BTC.mT, n=size)
        dx = torch.fft.irfft(dy * torch.fft.rfft(filter_CK, n=size).conj(), n=size)[..., :time].mT
        correlation = (dy * torch.fft.rfft(x_BTC.mT, n=size).conj()).sum(0)
        return dx, torch.fft.irfft(correlation, n=size)[..., :kernel]


class _Modal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_poles_CN: Tensor, residues_CN: Tensor, time: int) -> Tensor:
        ctx.save_for_backward(log_poles_CN, residues_CN)
        ages = torch.arange(time, device=residues_CN.device, dtype=residues_CN.dtype)
        h = residues_CN.new_zeros(residues_CN.shape[0], time)
        for pole, residue in zip(log_poles_CN.unbind(1), residues_CN.unbind(1), strict=True):
            # in place torch 2.11 compiles it without gradients
            h = h + residue[:, None] * (pole[:, None] * ages).exp()
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh_CT: Tensor) -> tuple[Tensor, Tensor, None]:
        log_poles_CN, residues_CN = ctx.saved_tensors
        ages = torch.arange(dh_CT.shape[1], device=dh_CT.device, dtype=dh_CT.dtype)
        d_poles = []
        d_residues = []
        for pole, residue in zip(log_poles_CN.unbind(1), residues_CN.unbind(1), strict=True):
            decayed = dh_CT * (pole[:, None] * ages).exp()
            d_residues.append(decayed.sum(1))
            d_poles.append(residue * (decayed * ages).sum(1))
        return torch.stack(d_poles, 1), torch.stack(d_residues, 1), None


def _by_document(
    convolve: Callable[[Tensor], Tensor], x_BTC: Tensor, document_BT: Tensor
) -> Tensor:
    """`convolve` of each document by itself. Documents of like lengths go together, padded to a
    power of two: at most twice the tokens, whatever the lengths.
    """
    batch, time, channels = x_BTC.shape
    flat = x_BTC.reshape(-1, channels)
    begins = (document_BT == torch.arange(time, device=x_BTC.device)).flatten().nonzero()[:, 0]
    lengths = begins.diff(append=begins.new_tensor([batch * time]))
    exponents = (lengths - 1).double().frexp().exponent  # the least power of two that holds them
    y = torch.zeros_like(flat)
    for exponent in sorted(set(exponents.tolist())):
        chosen = exponents == exponent
        places = torch.arange(1 << exponent, device=x_BTC.device)
        inside = places < lengths[chosen, None]
        at = (begins[chosen, None] + places).clamp(max=batch * time - 1)
        y = y.index_put((at[inside],), convolve(flat[at] * inside[..., None])[inside])
    return y.view(batch, time, channels)
