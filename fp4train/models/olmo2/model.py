"""OLMo 2: a decoder of rotary attention and SwiGLU, whose norms stand behind them
(arXiv:2501.00656, section 3).

    h = x + RMSNorm(attention(x))    y = h + RMSNorm(mlp(h))

Attention and MLP read the residual stream as it is. Queries and keys are normalised before they are
rotated, each over all heads together: tensor-parallel ranks, which share the heads, add up the
squares. No layer has a bias. First weights are normal with σ = 0.02 at every width and depth, those
that write to the residual stream too, since a norm follows them; each is drawn from its name and
position. OLMo-core cuts them off at 3σ (`InitMethod.normal`), which is not done here.

Linear layers of the blocks follow the recipe. Embedding, norms, attention products and the head
stay in high precision. `hf.py` has the names and the configuration that Hugging Face gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fp4train.models.common import (
    Attention,
    AttentionDecoder,
    FeaturesNorm,
    RMSNorm,
    RotaryBlock,
    RotaryShape,
    SwiGLU,
    attention_parameters,
    gated_mlp_parameters,
    rotary_ends,
)
from fp4train.parameters import Initial, Normal, ParameterSpec, Split, Spread, inside, norm
from fp4train.text import check_least

FIRST_SPREAD = 0.02
"""Standard deviation of the first weights (arXiv:2501.00656, section 3)."""


@dataclass(frozen=True, kw_only=True)
class Olmo2(RotaryShape):
    """Shape of an OLMo 2, beside what `RotaryShape` has.

    Args:
        hidden: width of the SwiGLU.
    """

    hidden: int = 384
    draw: ClassVar[str] = "counter"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, "model.", "hidden")

    def initial(self, initial: Initial | Spread | None) -> Initial | None:
        """Initial values, the scaled ones with σ = 0.02."""
        if isinstance(initial, Spread):
            return Normal(FIRST_SPREAD)
        return initial

    def parameters(self) -> Iterator[ParameterSpec]:
        yield from rotary_ends(self)
        block = [
            *attention_parameters("attention", "self_attn"),
            norm("attention.q_norm", "self_attn.q_norm.weight", cut=Split.FEATURES),
            norm("attention.k_norm", "self_attn.k_norm.weight", cut=Split.FEATURES),
            norm("attention_norm", "post_attention_layernorm.weight"),
            *gated_mlp_parameters("mlp", "mlp"),
            norm("mlp_norm", "post_feedforward_layernorm.weight"),
        ]
        for index in range(self.layers):
            yield from inside(f"blocks.{index}", f"model.layers.{index}", block)

    def build(self, *, vocab_size: int, seq_len: int) -> Olmo2Model:
        """The model with weights drawn by counter from the seed of torch's default generator.

        Raises:
            ValueError: the tokenizer has more ids than `vocab_size`, or a sequence more tokens than
                `max_positions`.
        """
        return Olmo2Model(self, vocab_size, seq_len)


class NormedAttention(Attention):
    """Attention whose queries and keys are normalised over all heads together."""

    q_norm: FeaturesNorm
    k_norm: FeaturesNorm

    def __init__(self, shape: Olmo2) -> None:
        super().__init__(
            width=shape.width,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_width,
        )
        self.q_norm = FeaturesNorm(shape.heads * shape.head_width, eps=shape.norm_eps)
        self.k_norm = FeaturesNorm(shape.kv_heads * shape.head_width, eps=shape.norm_eps)

    def normed(self, q_BTHE: Tensor, k_BTHE: Tensor) -> tuple[Tensor, Tensor]:
        q: Tensor = self.q_norm(q_BTHE.flatten(2))
        k: Tensor = self.k_norm(k_BTHE.flatten(2))
        return q.view_as(q_BTHE), k.view_as(k_BTHE)


class Olmo2Block(RotaryBlock):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, shape: Olmo2) -> None:
        super().__init__()
        self.attention = NormedAttention(shape)
        self.attention_norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = SwiGLU(shape.width, shape.hidden)
        self.mlp_norm = RMSNorm(shape.width, eps=shape.norm_eps)

    def attended(self, x_BTD: Tensor, *rotation_and_cache: Any, time: int) -> Tensor:
        y_BTD: Tensor = self.attention_norm(self.attention(x_BTD, *rotation_and_cache, time=time))
        return y_BTD

    def transformed(self, x_BTD: Tensor, time: int) -> Tensor:
        y_BTD: Tensor = self.mlp_norm(self.mlp(x_BTD))
        return y_BTD


class Olmo2Model(AttentionDecoder):
    """An OLMo 2 of one shape."""

    shape: Olmo2

    def new_blocks(self) -> Iterator[Olmo2Block]:
        return (Olmo2Block(self.shape) for _ in range(self.shape.layers))
