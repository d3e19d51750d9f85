"""A decoder's two ends: how tokens become the residual stream, and how the stream becomes logits or the loss.

The vocabulary may be cut over ranks (arXiv:1909.08053, section 3): each holds V/p rows of the weight. A token's row
lies on one rank, and the sum over the ranks adds zeros to it, so the embedding equals that of one rank in every bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4train.backends import widened
from fp4train.models.common.cut import WHOLE, StageCut, TokenRanks
from fp4train.models.common.loss import chunked_cross_entropy
from fp4train.nn.ranks import all_rows, local, with_summed_gradient
from fp4train.precision.context import activation_dtype


class Decoder(nn.Module):
    """A language model of `embed`, `blocks`, `norm` and `head`, which several ranks may share.

    A family's `forward` calls its blocks between `enter` and `leave`.
    """

    embed: nn.Embedding
    norm: nn.Module
    head: nn.Linear
    tensor: TokenRanks | None = None
    """The ranks that share the vocabulary and the tokens; set when the model is cut."""
    stage = WHOLE
    """The part of the model that this module is; set when it is cut."""

    def enter(self, input: Tensor) -> Tensor:
        """The residual stream before the blocks; `input` is tokens [B, T], or on a later stage the stream itself."""
        if not self.stage.first:
            return input
        dtype = activation_dtype(self.embed.weight.dtype)
        return embed(input, self.stage.embedding(self.embed.weight), dtype, self.tensor)

    def leave(self, x: Tensor, targets_BT: Tensor | None, time: int) -> Tensor:
        """The mean loss in nats per token, without targets the logits [B, T, vocabulary]; the stream on an earlier
        stage."""
        if not self.stage.last:
            return x
        x, w_VD = self.stage.head(self.norm(x), self.head.weight)
        x_MD = whole_tokens(x, self.tensor)
        if targets_BT is None:
            return logits(x_MD, w_VD, self.tensor).view(-1, time, w_VD.shape[0])
        return chunked_cross_entropy(x_MD, w_VD, targets_BT.flatten(), self.tensor)

    def fp4train_stages(self) -> StageCut:
        """How a pipeline cuts the model. Stages send each other the residual stream."""
        return StageCut(blocks="blocks", first=("embed",), last=("norm", "head"), width=self.embed.embedding_dim)


class _Sum(torch.autograd.Function):
    """The sum over the ranks, whole or this rank's rows of it; backward gives each rank the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, tensor: TokenRanks) -> Tensor:
        ctx.tensor = tensor
        return tensor.ranks.sum_rows(x_MD) if tensor.sequence else tensor.ranks.sum(x_MD.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        tensor: TokenRanks = ctx.tensor
        return tensor.ranks.gather_rows(dy) if tensor.sequence else dy, None


def embed(tokens_BT: Tensor, w_VD: Tensor, dtype: torch.dtype, tensor: TokenRanks | None) -> Tensor:
    """Rows of w [vocabulary, D] for the tokens, in `dtype`: [B, T, D].

    Args:
        tensor: ranks over which the vocabulary is cut; if tokens are cut too, the result is this rank's [B·T / p, D].
    """
    if tensor is None:
        return F.embedding(tokens_BT, w_VD).to(dtype)
    w_VD = local(w_VD)
    own = tokens_BT - tensor.ranks.rank * w_VD.shape[0]
    elsewhere = (own < 0) | (own >= w_VD.shape[0])
    x_BTD = F.embedding(own.masked_fill(elsewhere, 0), w_VD).to(dtype).masked_fill(elsewhere[..., None], 0)
    x = x_BTD.flatten(0, 1) if tensor.sequence else x_BTD
    summed: Tensor = _Sum.apply(x, tensor)  # type: ignore[no-untyped-call]
    return summed


def whole_tokens(x: Tensor, tensor: TokenRanks | None) -> Tensor:
    """The residual stream [tokens, D] of all tokens, from [B, T, D] or from this rank's share."""
    if tensor is None or not tensor.sequence:
        return x.flatten(0, 1)
    return all_rows(x, tensor.ranks)


def logits(h_MD: Tensor, w_VD: Tensor, tensor: TokenRanks | None) -> Tensor:
    """h·wᵀ [tokens, vocabulary], in the dtype of h; on every rank."""
    if tensor is None:
        return widened(F.linear, h_MD, w_VD.to(h_MD.dtype))
    h_MD = with_summed_gradient(h_MD, tensor.ranks)
    return all_rows(widened(F.linear, h_MD, local(w_VD).to(h_MD.dtype)).T, tensor.ranks).T
