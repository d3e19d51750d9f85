"""The shape of a decoder: the settings that all families have, and the table of its parameters."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fp4train.keys import CHANGES_DIGITS
from fp4train.parameters import ONES, Initial, Normal, ParameterSpec, Split, Spread
from fp4train.text import check_least

MOST_BLOCKS = 4096
"""Letters of the longest pattern."""


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The settings that the shapes of all families have.

    Args:
        width: width of the residual stream.
        heads, kv_heads: numbers of query heads and key/value heads; kv_heads divides heads
            (grouped-query attention).
        head_dim: elements of a head; None: width / heads.
        tied: whether the head shares the weight of the embedding.
        max_positions: tokens of the longest sequence that the model is made for; None:
            train.seq_len.
        norm_eps: ε of RMSNorm.
        recompute: save only the blocks' inputs for backward and recompute the other activations.
        vocab_multiple: the vocabulary is padded to a multiple of this, which keeps the head's GEMM
            aligned.
        vocab_size: rows of embedding and head, at least as many as the tokenizer has ids; None:
            those, padded.
    """

    width: int = 128
    heads: int = 2
    kv_heads: int = 1
    head_dim: int | None = None
    tied: bool = True
    max_positions: int | None = None
    norm_eps: float = 1e-5
    recompute: Annotated[bool, CHANGES_DIGITS] = False
    vocab_multiple: int = 64
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_least(self, "model.", "width", "heads", "kv_heads", "vocab_multiple")
        check_least(
            self, "model.", "head_dim", "max_positions", "vocab_size", must="at least 1, or null"
        )
        if not 0 < self.norm_eps < math.inf:
            raise ValueError(f"model.norm_eps={self.norm_eps} must be finite and above 0")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"model.width={self.width} is not divisible by model.heads={self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}"
            )

    @property
    def head_width(self) -> int:
        """Elements of a head."""
        return self.head_dim or self.width // self.heads

    def rows(self, vocab_size: int) -> int:
        """Rows of embedding and head for a tokenizer of `vocab_size` ids."""
        return self.vocab_size or -(-vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def residual_terms(self) -> int:
        """Terms that the blocks add to the residual stream, all together."""
        return 1

    def parameters(self) -> Iterable[ParameterSpec]:
        """The table of the model's parameters: their cut, initial values, groups, and names in
        folders.
        """
        return ()

    def ends(
        self, *, embed: str, norm: str, head: str, copied: bool = False
    ) -> list[ParameterSpec]:
        """The parameters outside of the blocks, with their names in a folder.

        Args:
            copied: whether a folder has a tied weight under both names.
        """
        return [
            ParameterSpec(
                name="embed.weight",
                stored=embed,
                cut=Split.VOCABULARY,
                initial=Spread.MATRIX,
                stage="first",
            ),
            ParameterSpec(
                name="norm.weight", stored=norm, cut=Split.TOKENS, initial=ONES, stage="last"
            ),
            ParameterSpec(
                name="head.weight",
                stored=head,
                cut=Split.VOCABULARY,
                initial=Spread.MATRIX,
                stage="last",
                tied="embed.weight" if self.tied else "",
                copied=copied,
            ),
        ]

    def initial(self, initial: Initial | Spread | None) -> Initial | None:
        """Initial values, the scaled ones with their standard deviation: 0.02, at most 1/√width; of
        what writes to the residual stream less (GPT-2), so that the stream's variance does not grow
        with depth.
        """
        if not isinstance(initial, Spread):
            return initial
        std = min(0.02, self.width**-0.5)
        return Normal(std / self.residual_terms**0.5 if initial is Spread.RESIDUAL else std)

    def check(self, vocab_size: int, seq_len: int) -> None:
        """Check that the model suits a tokenizer of `vocab_size` ids and sequences of `seq_len`
        tokens.

        Raises:
            ValueError: the tokenizer has more ids than there are rows, or a sequence more tokens
                than `max_positions`.
        """
        if self.max_positions is not None and seq_len > self.max_positions:
            raise ValueError(
                f"train.seq_len={seq_len} exceeds model.max_positions={self.max_positions}, "
                "the longest sequence that "
                "the model is made for: choose shorter sequences, or give "
                "model.max_positions=… to extend it"
            )
        if vocab_size > self.rows(vocab_size):
            raise ValueError(
                f"the tokenizer has {vocab_size} ids, and model.vocab_size={self.vocab_size} "
                "rows are fewer: choose "
                "the tokenizer that belongs to the model (data/tokenizer=…)"
            )


def check_pattern(pattern: str, kinds: Mapping[str, str]) -> None:
    """Raise ValueError where a text with a letter per block has too few or too many, or one that is
    not in `kinds`.
    """
    if not 1 <= len(pattern) <= MOST_BLOCKS:
        raise ValueError(f"model.pattern has {len(pattern)} blocks; allowed are 1 to {MOST_BLOCKS}")
    for place, letter in enumerate(pattern, 1):
        if letter not in kinds:
            listed = ", ".join(f"{kind} ({name})" for kind, name in kinds.items())
            raise ValueError(
                f"model.pattern={pattern}: letter {place} is {letter!r}; known are {listed}"
            )
