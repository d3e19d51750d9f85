"""StripedHyena 2: a decoder of gated convolutions and attention in the order of a pattern, as Evo 2
has it.

A block is x + mixer(norm(x)), then x + MLP(norm(x)). The letters of its mixers are those of
`mixer.py` (arXiv:2503.01868; Evo 2: Brixi et al. 2025). The MLP is gated, w_down·(a(w_gate·x) ⊙
w_up·x), where a is GELU in the first block and nothing in the others. The norms divide by the root
mean square plus ε.

Parameters are float32 masters; activations take the dtype of the surrounding `autocast` recipe.
Linear layers are plain `nn.Linear`s until `fp4train.convert` replaces them. Embedding, norms,
convolutions, attention products and the head stay in high precision.

Initial weights are drawn by counter (`models/common/initialise.py`): matrices normal with σ = 0.02
(at most 1/√width), those that write to the residual stream scaled by 1/√(2·blocks); those of a
convolution as `FilterShape.parameters` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.models.common import (
    DecodeCache,
    DecoderShape,
    KeyValues,
    RotaryDecoder,
    SharedNorm,
    check_pattern,
    gated_mlp_parameters,
)
from fp4train.models.hyena.mixer import (
    KINDS,
    ConvolutionState,
    FilterShape,
    FusedAttention,
    GatedConvolution,
)
from fp4train.parameters import ParameterSpec, inside, norm
from fp4train.text import check_choice, check_least

GELU = ("first", "all")


@dataclass(frozen=True, kw_only=True)
class Hyena(DecoderShape):
    """Shape of a StripedHyena 2 model, beside what `DecoderShape` has; its heads are those of
    attention.

    Args:
        pattern: a letter per block, `S`, `D`, `H` or `*`.
        filters: shape of the filters.
        hidden: width of the MLPs.
        gelu: the blocks whose MLP has GELU on its gate, `first` or `all`.
        rope_base: θ of the rotary embedding.
    """

    kv_heads: int = 2
    norm_eps: float = 1e-6
    pattern: str = "SDH*SDH"
    filters: FilterShape = field(default_factory=FilterShape)
    hidden: int = 256
    gelu: str = "first"
    rope_base: float = 10000.0
    draw: ClassVar[str] = "counter"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, "model.", "hidden")
        if self.kv_heads != self.heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} must be model.heads={self.heads}: one weight "
                "makes queries, keys and "
                "values of each head"
            )
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"model.rope_base={self.rope_base} must be finite and above 0")
        check_choice("model.gelu", self.gelu, GELU)
        check_pattern(self.pattern, KINDS)
        if "*" in self.pattern and self.head_width % 2:
            raise ValueError(
                f"heads of {self.head_width} elements: rotary embedding needs an even number"
            )
        if self.width % self.filters.groups and set("SD") & set(self.pattern):
            raise ValueError(
                f"model.width={self.width} is not divisible by "
                f"model.filters.groups={self.filters.groups}: each filter "
                "serves as many channels"
            )

    @property
    def residual_terms(self) -> int:
        return 2 * len(self.pattern)

    def parameters(self) -> Iterator[ParameterSpec]:
        yield from self.ends(
            embed="embedding_layer.weight", norm="norm.scale", head="unembed.weight"
        )
        for index, kind in enumerate(self.pattern):
            block = [
                norm("norm", "pre_norm.scale"),
                norm("mlp_norm", "post_norm.scale"),
                *gated_mlp_parameters("mlp", "mlp", ("l1", "l2", "l3")),
                *inside("mixer", "", self.filters.parameters(kind, self.width)),
            ]
            yield from inside(f"blocks.{index}", f"blocks.{index}", block)

    def build(self, *, vocab_size: int, seq_len: int) -> HyenaModel:
        """The model with weights drawn by counter from the seed of torch's default generator.

        Raises:
            ValueError: the tokenizer has more ids than `vocab_size`, or a sequence more tokens than
                `max_positions`.
        """
        return HyenaModel(self, vocab_size, seq_len)


class RootNorm(SharedNorm):
    """w ⊙ x / (√(mean(x²)) + ε), computed in float32: ε is outside of the root."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., width]."""
        assert self.eps is not None
        wide = x.float()
        root = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        y: Tensor = (self.used_weight * (wide / (root + self.eps))).to(x.dtype)
        return y


class HyenaMLP(nn.Module):
    """w_down·(a(w_gate·x) ⊙ w_up·x); a is GELU, or nothing."""

    def __init__(self, width: int, hidden: int, *, gelu: bool) -> None:
        super().__init__()
        self.gelu = gelu
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        out: Tensor = self.down((F.gelu(gate) if self.gelu else gate) * self.up(x))
        return out


class HyenaBlock(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Hyena, index: int) -> None:
        super().__init__()
        self.kind = shape.pattern[index]
        self.norm = RootNorm(shape.width, eps=shape.norm_eps)
        self.mixer: GatedConvolution | FusedAttention
        if self.kind == "*":
            self.mixer = FusedAttention(
                width=shape.width, heads=shape.heads, head_dim=shape.head_width
            )
        else:
            self.mixer = GatedConvolution(shape.width, self.kind, shape.filters)
        self.mlp_norm = RootNorm(shape.width, eps=shape.norm_eps)
        self.mlp = HyenaMLP(shape.width, shape.hidden, gelu=index == 0 or shape.gelu == "all")

    def forward(
        self,
        x_BTD: Tensor,
        cos_TE: Tensor,
        sin_TE: Tensor,
        kept: Any = None,
        mask_BTT: Tensor | None = None,
    ) -> Tensor:
        n_BTD = self.norm(x_BTD)
        if self.kind == "*":
            x_BTD = x_BTD + self.mixer(n_BTD, cos_TE, sin_TE, kept, mask_BTT)
        else:
            x_BTD = x_BTD + self.mixer(n_BTD, cos_TE.shape[0], kept, mask_BTT)
        y_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return y_BTD

    def cache(self, length: int) -> KeyValues | ConvolutionState:
        """An empty cache for up to `length` tokens."""
        if self.kind == "*":
            return KeyValues(length)
        return ConvolutionState()


class HyenaModel(RotaryDecoder):
    """A StripedHyena 2 of one shape."""

    takes_chunks = True
    shape: Hyena

    last_norm = RootNorm

    def new_blocks(self) -> Iterator[HyenaBlock]:
        return (HyenaBlock(self.shape, index) for index in range(len(self.shape.pattern)))

    def fp4train_cache(self, length: int) -> DecodeCache:
        """Keys and values, or the windows and states of convolutions, of each block."""
        return DecodeCache([cast(HyenaBlock, block).cache(length) for block in self.blocks])
