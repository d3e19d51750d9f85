"""Text from a model, token by token, with a cache of the tokens before.

All sequences of a batch stand at the same position: the shortest prompt is run as a whole, and
where another one is longer, its own tokens are taken instead of sampled ones until it ends. No
token is padding, so that every family of models can have a cache, and no scale of a recipe covers
values that are not there.

Each sequence has random numbers of its own, so that what is sampled depends on the seed and its
place in the batch, not on its neighbours.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4train.data.tokens import Tokenizer
from fp4train.errors import UserError
from fp4train.exchange.trained import NamedRecipe, TrainedModel
from fp4train.models.common import Cached
from fp4train.precision.settings import ConstantWeights

_CONTEXT = 16
"""Tokens before a new one that its text may depend on."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        tokens: most tokens that are generated.
        temperature: divisor of the logits; 0: the most likely token.
        top_k: number of the most likely tokens to choose from; None: all.
        top_p: probability that the tokens to choose from, the most likely ones, have together
            (arXiv:1904.09751); 1: all.
        seed: seed of the random numbers.
    """

    tokens: int = 64
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number ≥ 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must lie between 0 and 2**63 - 1")

    def draw(self, logits_V: Tensor, draws: torch.Generator) -> int:
        """The next token.

        Args:
            logits_V: logits of the tokens that there are, on the CPU.
            draws: generator whose next number decides; none is taken at temperature 0.
        """
        if self.temperature == 0:
            return int(logits_V.argmax())
        logits, ids = logits_V.double().div(self.temperature).sort(descending=True, stable=True)
        p = logits.softmax(-1)
        if self.top_k is not None:
            p = p[: self.top_k]
        p = p[p.cumsum(-1) - p < self.top_p]
        place = torch.rand((), dtype=torch.float64, generator=draws) * p.sum()
        return int(ids[min(int(torch.searchsorted(p.cumsum(-1), place, right=True)), len(p) - 1)])


def generate(
    trained: TrainedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    named: NamedRecipe,
    ends: Collection[int],
    stops: Callable[[int], bool] = lambda row: False,
) -> Iterator[list[int | None]]:
    """The token that each sequence gets, position by position; None where its prompt goes on, or it
    has ended.

    A sequence ends after `sampling.tokens` tokens, after a token of `ends`, or where the model's
    context is full.

    Args:
        prompts: token ids, at least one each.
        stops: whether a sequence, by its place in the batch, is to end with the tokens that it has;
            asked after each.

    Raises:
        UserError: a prompt is empty or fills the context, the model has no cache, or a logit is not
            finite.
    """
    model = trained.model
    if not isinstance(model, Cached):
        raise UserError(f"{type(model).__name__} has no cache (fp4train_cache): it cannot generate")
    for prompt in prompts:
        check_prompt(prompt, model.seq_len)
    begun = min(map(len, prompts))
    longest = min(max(map(len, prompts)) + sampling.tokens, model.seq_len)
    cache = model.fp4train_cache(longest)
    draws = [
        torch.Generator().manual_seed((sampling.seed + row) % 2**63) for row in range(len(prompts))
    ]
    inputs = torch.tensor([prompt[:begun] for prompt in prompts])
    left = [sampling.tokens] * len(prompts)
    constant = ConstantWeights()
    for position in range(begun, longest):
        logits_BTV = trained.forward(named, inputs, constant=constant, cache=cache)
        logits_BV = logits_BTV[:, -1, : trained.vocab_size].float().cpu()
        sampled: list[int | None] = [None] * len(prompts)
        following = [0] * len(prompts)
        for row, prompt in enumerate(prompts):
            if position < len(prompt):
                following[row] = prompt[position]
            elif left[row]:
                check_logits(logits_BV[row], trained, named)
                token = sampling.draw(logits_BV[row], draws[row])
                sampled[row] = token
                following[row] = token
                left[row] = 0 if token in ends else left[row] - 1
        yield sampled
        for row in range(len(prompts)):
            if sampled[row] is not None and stops(row):
                left[row] = 0
        if not any(left):
            return
        inputs = torch.tensor(following)[:, None]


def check_prompt(prompt: Sequence[int], context: int) -> None:
    """Raises UserError where a prompt is empty, or leaves no place for a token after it."""
    if not prompt:
        raise UserError("the prompt is empty: it needs one token at least")
    if len(prompt) >= context:
        raise UserError(
            f"the prompt has {len(prompt):,} tokens, and with one more it exceeds the model's "
            f"context of {context:,} "
            "(train.seq_len): shorten it"
        )


def check_logits(logits: Tensor, trained: TrainedModel, named: NamedRecipe) -> None:
    """Raises UserError where one is not finite."""
    if not bool(logits.isfinite().all()):
        raise UserError(
            f"the model of {trained.title} gives logits that are not finite in {named.name}"
        )


class TextStream:
    """The text of tokens that come one by one; characters that are not complete yet are held back.

    Args:
        prompt: the tokens before them. Where a tokenizer decodes the first token of a text without
            its space, theirs is kept. Without a prompt the text is that of the tokens alone.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._ids = list(prompt[-_CONTEXT:])
        self._shown = tokenizer.decode(self._ids) if self._ids else ""
        """The text of `_ids` that was given out, or that the prompt has."""

    def add(self, token: int) -> str:
        """The text that was added."""
        self._ids.append(token)
        decoded = self.tokenizer.decode(self._ids)
        if decoded.endswith("\ufffd"):
            return ""
        return self._grown(decoded)

    def end(self) -> str:
        """The text that was held back."""
        if self._ids:
            return self._grown(self.tokenizer.decode(self._ids))
        return ""

    def _grown(self, decoded: str) -> str:
        new = decoded[len(self._shown) :]
        self.text += new
        self._shown = decoded
        if len(self._ids) > 4 * _CONTEXT:  # long texts are not decoded anew for each token
            self._ids = self._ids[-_CONTEXT:]
            self._shown = self.tokenizer.decode(self._ids)
        return new
