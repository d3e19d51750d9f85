"""The decoder that families share: embedding, blocks with what they keep or recompute, stages, head
and loss.

The vocabulary may be cut over ranks (arXiv:1909.08053, section 3): each holds V/p rows of the
weight. A token's row lies on one rank, and the sum over the ranks adds zeros to it, so the
embedding equals that of one rank in every bit.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.backends import widened
from fp4train.models.common.cache import DecodeCache
from fp4train.models.common.chunks import SequenceRanks
from fp4train.models.common.cut import WHOLE, TokenRanks
from fp4train.models.common.distillation import TeacherStates, chunked_distillation
from fp4train.models.common.initialise import initialise
from fp4train.models.common.layers import RMSNorm
from fp4train.models.common.liger import Liger
from fp4train.models.common.loss import chunked_cross_entropy
from fp4train.models.common.operators import Fusible
from fp4train.models.common.shape import DecoderShape
from fp4train.nn.ranks import all_rows, local, summed_over, with_summed_gradient
from fp4train.parameters import ParameterSpec, Spread
from fp4train.precision.context import activation_dtype
from fp4train.precision.recompute import recompute
from fp4train.shards import RowOrder


class Decoder(Fusible, nn.Module):
    """A language model of `embed`, `blocks`, `norm` and `head`, which several ranks may share.

    `forward(tokens, targets)` gives the mean loss in nats per token; `forward(tokens)` the logits.
    As a stage of a pipeline (`stage`) all but the first take the residual stream, and all but the
    last give it.

    A block is called with the residual stream, what `positions` gives, what the cache keeps of it
    (or None), and, where documents are told apart, which tokens each one sees (`document_mask`).
    """

    shape: DecoderShape
    embed: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module
    head: nn.Linear
    seq_len: int
    """The longest sequence."""
    by_weight: tuple[str, ...] = ("head",)
    """Names of the layers that are not called: other code multiplies their weights."""
    recomputes = False
    """Whether only the inputs of blocks are kept for the backward pass."""
    tensor: TokenRanks | None = None
    """The ranks that share the vocabulary and the tokens; set when the model is cut."""
    row_orders: Mapping[str, RowOrder] = MappingProxyType({})
    """The parameters that tensor parallelism cuts in segments, by name; set when the model is
    cut.
    """
    takes_chunks = False
    """Whether all modules that mix the tokens of a sequence have an attribute `sequence`, so that
    ranks may have chunks of it.
    """
    sequence: SequenceRanks | None = None
    """The ranks that have a chunk of every sequence each; set when sequences are cut."""
    documents: int | None = None
    """The id that ends a document, where attention stays within documents; None: none does. One
    within a document comes as its complement, −1 − id (`data/loader.py`).
    """
    begins: int | None = None
    """The id that begins a document, where attention stays within documents. Without both ids it
    goes over all tokens before.
    """
    masked = False
    """Whether targets may be below 0, which have no loss: `loss` is then their sum over all tokens,
    not over those.
    """
    hidden = False
    """Whether the forward pass ends with the hidden states [tokens, D] that the head reads, of a
    teacher.
    """
    stage = WHOLE
    """The part of the model that this module is; set when it is cut."""

    def positions(self, first: int, end: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """Arguments of the blocks that depend on positions (rotations), for the tokens `first` to
        `end`, in `dtype`.
        """
        return ()

    def forward(
        self,
        input: Tensor,
        targets_BT: Tensor | None = None,
        *,
        time: int | None = None,
        cache: DecodeCache | None = None,
        teacher: TeacherStates | None = None,
    ) -> Tensor:
        """The loss, the logits [B, T, vocabulary], or the residual stream.

        Args:
            input: tokens [B, T]; on a later stage of a pipeline the residual stream [B, T, D], or
                where tensor-parallel ranks share the tokens this rank's rows of it [B·T / p, D].
            targets_BT: tokens.
            time: T, for a later stage; None: the second dimension of `input`.
            cache: cache of the tokens before those of `input`, which are added to it.
            teacher: with targets, what the loss is against.
        """
        time = input.shape[1] if time is None else time
        start = 0 if cache is None else cache.seen
        if self.sequence is not None:
            start = self.sequence.ranks.rank * time
        if (end := start + time) > self.seq_len:
            raise ValueError(f"{end} tokens exceed the model's seq_len={self.seq_len}")
        divided = self.documents is not None or self.begins is not None
        if divided:
            borders = [
                None if token is None else input == token for token in (self.documents, self.begins)
            ]
            input = torch.where(input < 0, ~input, input)
        x = self.enter(input)
        arguments: tuple[Any, ...] = self.positions(start, end, x.dtype)
        if cache is not None:
            for block, kept in zip(self.blocks, cache.blocks, strict=True):
                x = block(x, *arguments, kept)
            cache.seen = end
            return self.leave(x, targets_BT, time)
        if divided:
            if self.sequence is not None:
                borders = [self.sequence.until_here(border) for border in borders]
            arguments = (*arguments, None, document_mask(*borders, first=start))
        recomputes = self.recomputes and self.training
        for block in self.blocks:
            x = recompute(block, x, *arguments) if recomputes else block(x, *arguments)
        return self.leave(x, targets_BT, time, teacher)

    def enter(self, input: Tensor) -> Tensor:
        """The residual stream before the blocks; `input` is tokens [B, T], or on a later stage the
        stream itself.
        """
        if not self.stage.first:
            return input
        dtype = activation_dtype(self.embed.weight.dtype)
        return embed(input, self.stage.embedding(self.embed.weight), dtype, self.tensor)

    def leave(
        self, x: Tensor, targets_BT: Tensor | None, time: int, teacher: TeacherStates | None = None
    ) -> Tensor:
        """The mean loss in nats per token, with a teacher that against it; without targets the
        logits [B, T, vocabulary]; the stream on an earlier stage.
        """
        if not self.stage.last:
            return x
        x, w_VD = self.stage.head(self.norm(x), self.head.weight)
        x_MD = whole_tokens(x, self.tensor)
        if self.hidden:
            return x_MD
        if teacher is not None and targets_BT is not None:
            return chunked_distillation(
                x_MD, w_VD, targets_BT.flatten(), teacher, masked=self.masked
            )
        if targets_BT is None:
            return logits(x_MD, w_VD, self.tensor).view(-1, time, w_VD.shape[0])
        if isinstance(self.operators, Liger):
            liger = self.operators
        else:
            liger = None
        return chunked_cross_entropy(
            x_MD, w_VD, targets_BT.flatten(), self.tensor, masked=self.masked, liger=liger
        )

    def fp4train_parameters(self) -> list[ParameterSpec]:
        """The parameters and buffers that this part of the model has, of the table of its shape."""
        names = {*dict(self.named_parameters(remove_duplicate=False)), *dict(self.named_buffers())}
        return [spec for spec in (*_table(self.shape), *self.computed()) if spec.name in names]

    def computed(self) -> Iterable[ParameterSpec]:
        """The buffers that follow from the shape, which no checkpoint holds."""
        return ()


@cache
def _table(shape: DecoderShape) -> list[ParameterSpec]:
    """The parameters of a model, with the initial values that the shape gives them."""
    return [
        replace(spec, initial=shape.initial(spec.initial))
        if isinstance(spec.initial, Spread)
        else spec
        for spec in shape.parameters()
    ]


class FamilyDecoder(Decoder):
    """A decoder whose parts follow from its shape: a family gives its blocks."""

    last_norm: type[nn.RMSNorm] = RMSNorm
    """The class of the norm before the head."""

    def __init__(self, shape: DecoderShape, vocab_size: int, seq_len: int) -> None:
        """Make the parts, in the order in which torch's generator draws their weights.

        Args:
            vocab_size: number of ids of the tokenizer.

        Raises:
            ValueError: the model does not suit it, or sequences of `seq_len` tokens.
        """
        super().__init__()
        shape.check(vocab_size, seq_len)
        self.shape = shape
        self.vocab_size = shape.rows(vocab_size)
        self.seq_len = seq_len
        self.recomputes = shape.recompute
        self.embed = nn.Embedding(self.vocab_size, shape.width)
        self.blocks = nn.ModuleList(self.new_blocks())
        self.norm = self.last_norm(shape.width, eps=shape.norm_eps)
        self.head = nn.Linear(shape.width, self.vocab_size, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        initialise(self, getattr(shape, "draw", "torch"))

    @abstractmethod
    def new_blocks(self) -> Iterable[nn.Module]:
        """The blocks of a new model, each made when it is taken."""


def document_mask(
    ends_BT: Tensor | None, begins_BT: Tensor | None = None, *, first: int = 0
) -> Tensor:
    """Mask of the tokens that each one from `first` on attends to: those of its own document up to
    itself; bool [B, 1, T - first, T].

    Args:
        ends_BT: whether a token is the last one of a document; None: no token says so.
        begins_BT: whether a token is the first one of a document; None: no token says so.
    """
    numbers = []  # of the document of each token
    if ends_BT is not None:
        numbers.append(ends_BT.cumsum(1) - ends_BT.long())  # ends before each token
    if begins_BT is not None:
        numbers.append(begins_BT.cumsum(1))
    number = torch.stack(numbers).sum(0)
    return (number[:, None, first:, None] == number[:, None, None, :]).tril(first)


def embed(tokens_BT: Tensor, w_VD: Tensor, dtype: torch.dtype, tensor: TokenRanks | None) -> Tensor:
    """Rows of w [vocabulary, D] for the tokens, in `dtype`: [B, T, D].

    Args:
        tensor: ranks over which the vocabulary is cut; if tokens are cut too, the result is this
            rank's [B·T / p, D].
    """
    if tensor is None:
        return F.embedding(tokens_BT, w_VD).to(dtype)
    w_VD = local(w_VD)
    rows = tokens_BT - tensor.ranks.rank * w_VD.shape[0]
    elsewhere = (rows < 0) | (rows >= w_VD.shape[0])
    x_BTD = (
        F.embedding(rows.masked_fill(elsewhere, 0), w_VD)
        .to(dtype)
        .masked_fill(elsewhere[..., None], 0)
    )
    x = x_BTD.flatten(0, 1) if tensor.sequence else x_BTD
    return summed_over(x, tensor.ranks, rows=tensor.sequence, dtype=dtype)


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
