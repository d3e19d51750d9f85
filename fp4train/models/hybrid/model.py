"""A decoder of Mamba-2, attention and MLP blocks in the order of a pattern, as Nemotron-H has it
(arXiv:2504.03624).

| letter | block: x + mixer(norm(x)) |
|---|---|
| `M` | Mamba-2 (arXiv:2405.21060) |
| `*` | attention with grouped queries, without positions: the recurrences before it know them |
| `-` | MLP: w_down·relu(w_up·x)² (arXiv:2109.08668) |

Parameters are float32 masters; activations take the dtype of the surrounding `autocast` recipe.
Linear layers are plain `nn.Linear`s until `fp4train.convert` replaces them. Embedding, norms,
convolutions, scans, attention products and the head stay in high precision.

Initial weights are drawn by counter (`models/common/initialise.py`): matrices normal with σ = 0.02
(at most 1/√width), those that write to the residual stream scaled by 1/√blocks; a Mamba-2 block's
own as its table says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.models.common import (
    Attention,
    DecodeCache,
    DecoderShape,
    FamilyDecoder,
    KeyValues,
    RMSNorm,
    attention_parameters,
    check_pattern,
)
from fp4train.models.common.scan import Mamba2, ScanShape, ScanState
from fp4train.parameters import (
    ParameterSpec,
    Split,
    inside,
    linear,
    norm,
)
from fp4train.text import check_least

KINDS = {"M": "Mamba-2", "*": "attention", "-": "MLP"}


@dataclass(frozen=True, kw_only=True)
class Hybrid(DecoderShape):
    """Shape of a hybrid model, beside what `DecoderShape` has; its heads are those of attention.

    Args:
        pattern: a letter per block, `M`, `*` or `-`.
        scan: shape of the Mamba-2 blocks.
        hidden: width of the MLPs.
    """

    pattern: str = "M-M-M*-"
    scan: ScanShape = field(default_factory=ScanShape)
    hidden: int = 512
    draw: ClassVar[str] = "counter"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, "model.", "hidden")
        check_pattern(self.pattern, KINDS)

    @property
    def residual_terms(self) -> int:
        return len(self.pattern)

    def parameters(self) -> Iterator[ParameterSpec]:
        yield from self.ends(
            embed="backbone.embeddings.weight", norm="backbone.norm_f.weight", head="lm_head.weight"
        )
        mixers = {
            "M": [*inside("mixer", "mixer", self.scan.parameters())],
            "*": attention_parameters("mixer", "mixer"),
            "-": [
                *linear("mixer.up", "mixer.up_proj", cut=Split.OUT),
                *linear("mixer.down", "mixer.down_proj", cut=Split.IN),
            ],
        }
        for index, kind in enumerate(self.pattern):
            block = [norm("norm", "norm.weight"), *mixers[kind]]
            yield from inside(f"blocks.{index}", f"backbone.layers.{index}", block)

    def build(self, *, vocab_size: int, seq_len: int) -> HybridModel:
        """The model with weights drawn by counter from the seed of torch's default generator.

        Raises:
            ValueError: the tokenizer has more ids than `vocab_size`, or a sequence more tokens than
                `max_positions`.
        """
        return HybridModel(self, vocab_size, seq_len)


class SquaredReluMLP(nn.Module):
    """w_down·relu(w_up·x)²."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class HybridBlock(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, shape: Hybrid, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.mixer: Mamba2 | Attention | SquaredReluMLP
        if kind == "M":
            self.mixer = Mamba2(shape.scan, width=shape.width, eps=shape.norm_eps)
        elif kind == "*":
            self.mixer = Attention(
                width=shape.width,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_width,
            )
        else:
            self.mixer = SquaredReluMLP(shape.width, shape.hidden)

    def forward(
        self,
        x_BTD: Tensor,
        time: int,
        kept: Any = None,
        mask_BTT: Tensor | None = None,
    ) -> Tensor:
        n_BTD = self.norm(x_BTD)
        y_BTD: Tensor
        if self.kind == "-":
            y_BTD = self.mixer(n_BTD)
        elif self.kind == "M":
            y_BTD = self.mixer(n_BTD, time, kept, mask_BTT)
        else:
            y_BTD = self.mixer(n_BTD, None, None, kept, mask_BTT, time=time)
        return x_BTD + y_BTD

    def cache(self, length: int) -> KeyValues | ScanState | None:
        """An empty cache for up to `length` tokens."""
        if self.kind == "M":
            return ScanState()
        return KeyValues(length) if self.kind == "*" else None


class HybridModel(FamilyDecoder):
    """A hybrid of one shape."""

    takes_chunks = True
    shape: Hybrid

    def new_blocks(self) -> Iterator[HybridBlock]:
        return (HybridBlock(self.shape, kind) for kind in self.shape.pattern)

    def positions(self, first: int, end: int, dtype: torch.dtype) -> tuple[int]:
        """The number of tokens: ranks that share them do not see it."""
        return (end - first,)

    def fp4train_cache(self, length: int) -> DecodeCache:
        """Keys and values, or the state of a scan, of each block."""
        return DecodeCache([cast(HybridBlock, block).cache(length) for block in self.blocks])
