"""Cross-entropy of a language-model head without ever holding all logits.

    loss = mean_m [ logsumexp_v(h_m·W_v) − h_m·W_target ]

With a vocabulary of 128 k and 8 k tokens the float32 logits alone are 4 GB. Here tokens are taken
in chunks: each chunk's logits are made, turned at once into the gradients of h and W, and dropped,
so backward only scales what forward found (as in Liger Kernel and Cut Cross-Entropy,
arXiv:2411.09009).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.backends import add_product, widened
from fp4train.models.common.cut import TokenRanks
from fp4train.models.common.liger import Liger
from fp4train.nn.ranks import Ranks, local

_LOGITS_IN_A_CHUNK = 1 << 23
"""Logits held at a time: 32 MB in float32, which a CPU's caches and memory take well."""

_ROWS_ON_A_GPU = 4096
"""Rows of a chunk at least: each chunk reads the head twice in BF16, and reads and writes its
float32 gradient, 12·V·D bytes, 1.6 GB at 128 k × 1024, where the logits of 4096 rows are 2 GB.
"""


LOGIT_BYTES = 52
"""Bytes that torch's operators move per BF16 logit for the loss and its gradient: 6 to make it
float32, 24 in logsumexp (the largest, differences, exponentials, their sum), 16 for the gradient, 6
to round it.
"""


def chunk_rows(device: str, vocabulary: int) -> int:
    """Tokens whose logits are held at a time on a device of this type."""
    rows = max(1, _LOGITS_IN_A_CHUNK // vocabulary)
    if device == "cuda":
        return max(rows, _ROWS_ON_A_GPU)
    return rows


ChunkLosses = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]
"""Function from the logits [C, V] of a chunk, its targets [C, 1] and its rows to its losses and the
gradient of the logits, which may be in their memory.
"""


class ChunkedLoss(torch.autograd.Function):
    """A loss whose forward pass makes the gradients of hidden states and head, times the number of
    tokens.

    Backward scales them where they lie, so that a graph has one backward pass. Of the head they
    move, per weight and microbatch of n chunks, 8n − 4 bytes in the products that add them up in
    float32, 8 here, and from the second microbatch on 12 where autograd adds them to `.grad` in
    place. One pass for the last two (`addcmul`) would move 12, but rounds product and sum together:
    two microbatches would not have the bits of two ranks. So the first microbatch moves 8n + 4, the
    least where the factor is known in backward only, and a later one 8n + 16 of 8n + 8: 1.33 times
    the least for two chunks, and 1.15 at most from six on.
    """

    @staticmethod
    def over_chunks(
        ctx: Any,
        h_MD: Tensor,
        w_VD: Tensor,
        targets_M: Tensor,
        losses_of: ChunkLosses,
        ranks: Ranks | None = None,
    ) -> Tensor:
        """The mean loss of all tokens.

        Products have the dtype of h, but for float16, whose range sums over tokens exceed: float32
        then.
        """
        dtype = h_MD.dtype
        if dtype == torch.float16:
            dtype = torch.float32
        tokens = h_MD.shape[0]
        rows = chunk_rows(h_MD.device.type, w_VD.shape[0] * (1 if ranks is None else ranks.size))
        w = w_VD.to(dtype)
        dh = torch.empty_like(h_MD) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.empty(w_VD.shape, dtype=torch.float32, device=w_VD.device)
        total = torch.zeros((), device=h_MD.device)
        for start in range(0, tokens, rows):
            chunk = slice(start, start + rows)
            h = h_MD[chunk].to(dtype)
            losses, grad = losses_of(widened(torch.mm, h, w.T), targets_M[chunk, None], chunk)
            total += losses.sum()
            if dh is None and dw is None:
                continue
            grad = grad.to(dtype)
            if dh is not None and ranks is None:
                dh[chunk] = widened(torch.mm, grad, w).to(dh.dtype)
            # partial sums, added before they are rounded
            elif dh is not None and ranks is not None:
                dh[chunk] = ranks.sum(grad.float() @ w.float()).to(dtype).to(dh.dtype)
            if dw is not None:
                add_product(dw, grad.T, h, first=start == 0)
        ctx.save_for_backward(dh, dw)
        ctx.tokens = tokens
        ctx.dtype = w_VD.dtype
        return total / tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        # Divided by the tokens only here, together with a loss scale in `grad`: before, float16
        # would underflow.
        share = grad / ctx.tokens
        no_gradients = (None,) * (len(ctx.needs_input_grad) - 2)
        dh, dw = (None if gradient is None else scale(gradient, share) for gradient in (dh, dw))
        return dh, None if dw is None else dw.to(ctx.dtype), *no_gradients


class _ChunkedCrossEntropy(ChunkedLoss):
    @staticmethod
    def forward(
        ctx: Any,
        h_MD: Tensor,
        w_VD: Tensor,
        targets_M: Tensor,
        ranks: Ranks | None,
        masked: bool,
        liger: Liger | None,
    ) -> Tensor:
        gradient = any(ctx.needs_input_grad[:2])

        def losses_of(logits: Tensor, target: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
            if liger is not None and ranks is None:
                return liger.cross_entropy(logits, target[:, 0], gradient=gradient), logits
            return _losses(logits.float(), target, ranks, masked=masked, gradient=gradient)

        return ChunkedLoss.over_chunks(ctx, h_MD, w_VD, targets_M, losses_of, ranks)


def _losses(
    logits: Tensor, target: Tensor, ranks: Ranks | None, *, masked: bool, gradient: bool
) -> tuple[Tensor, Tensor]:
    """(Losses [C, 1], with `gradient` that of the logits, which may be in their memory) of float32
    logits [C, V].
    """
    counts = target >= 0 if masked else None
    if counts is not None:
        target = target.masked_fill(~counts, 0)
    if ranks is None:
        log_norm = logits.logsumexp(-1, keepdim=True)
        at_target = logits.gather(1, target)
    else:
        log_norm, at_target, target, here = _over_ranks(logits, target, ranks)
    losses = log_norm - at_target
    losses = losses if counts is None else losses * counts
    if not gradient:
        return losses, logits
    grad = logits.sub_(log_norm).exp_()
    ones = torch.ones_like(target, dtype=grad.dtype)
    subtract_at(grad, target, ones if ranks is None else ones * here)
    return losses, grad if counts is None else grad.mul_(counts)


def subtract_at(p_CV: Tensor, column_C1: Tensor, amount_C1: Tensor) -> Tensor:
    """p, in place, less `amount` at one column of each row.

    No element is added to twice, so atomic additions repeat their bits. torch's deterministic form
    sorts the columns and, in some versions, reads the largest on the host, which no CUDA graph can
    record: it is left out. The compiler traces no such switch, and chooses itself.
    """
    if torch.compiler.is_compiling():
        return p_CV.scatter_add_(1, column_C1, -amount_C1)
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if strict:
        torch.use_deterministic_algorithms(False)
    try:
        return p_CV.scatter_add_(1, column_C1, -amount_C1)
    finally:
        if strict:
            torch.use_deterministic_algorithms(True, warn_only=warns)


def _over_ranks(
    logits_CV: Tensor, target_C1: Tensor, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logsumexp over the whole vocabulary, logit of the target, its column here or 0, whether it
    is here), each [C, 1], of logits for this rank's part of the vocabulary.
    """
    column = target_C1 - ranks.rank * logits_CV.shape[1]
    here = (column >= 0) & (column < logits_CV.shape[1])
    column = column.masked_fill(~here, 0)
    largest = ranks.largest(logits_CV.amax(-1, keepdim=True))
    mass = logits_CV.sub(largest).exp_().sum(-1, keepdim=True)
    mass, at_target = ranks.sum(torch.stack((mass, logits_CV.gather(1, column) * here)))
    return largest + mass.log(), at_target, column, here


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """x, in place, times a float32 factor, rounded once: a factor in BF16 would scale all gradients
    by up to 0.4 %.
    """
    return x.mul_(factor.view(1))  # a factor without dimensions would take the dtype of x


def chunked_cross_entropy(
    h_MD: Tensor,
    w_VD: Tensor,
    targets_M: Tensor,
    tensor: TokenRanks | None = None,
    *,
    masked: bool = False,
    liger: Liger | None = None,
) -> Tensor:
    """Mean cross-entropy in nats, float32 scalar.

    Args:
        h_MD: hidden states [tokens, width].
        w_VD: head weight [vocabulary, width].
        targets_M: int64 [tokens].
        tensor: ranks over which the vocabulary is cut; every rank has all of h and gets the same
            loss.
        masked: a target below 0 has no loss; the sum is divided by all tokens even so.
        liger: whose kernel takes losses and gradients of the logits; None, or over ranks: torch's
            operators.
    """
    ranks = None if tensor is None else tensor.ranks
    weight = w_VD if ranks is None else local(w_VD)
    loss: Tensor = _ChunkedCrossEntropy.apply(h_MD, weight, targets_M, ranks, masked, liger)  # type: ignore[no-untyped-call]
    return loss
