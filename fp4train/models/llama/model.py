"""Llama: a decoder of RMSNorm, rotary attention with grouped queries, and SwiGLU (arXiv:2302.13971,
arXiv:2407.21783).

Two options give other families: biases of queries, keys and values Qwen2 (arXiv:2407.10671), norms
of queries and keys Qwen3 (arXiv:2505.09388). `hf.py` has the names and the configuration that
Hugging Face gives them.

Parameters are float32 masters; activations take the dtype of the surrounding `autocast` recipe. The
linear layers of the blocks are plain `nn.Linear`s until `fp4train.convert` replaces them.
Embedding, norms, attention products and the head stay in high precision.

Initialisation: normal with σ = 0.02 (capped at 1/√width), the projections that write to the
residual stream scaled by 1/√(2·layers). Those of small models come from torch's generator in
sequence, those of large ones each by itself from its name and position
(`models/common/initialise.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp4train.models.common import (
    AttentionDecoder,
    PreNormBlock,
    PreNormShape,
    SwiGLU,
    gated_mlp_parameters,
    pre_norm_parameters,
    rotary_ends,
)
from fp4train.parameters import ZEROS, ParameterSpec, Split, inside
from fp4train.text import check_least

LARGE = 500_000_000
"""Weights of the blocks from which on each is drawn by itself: those of `llama_1b` are 973 M."""


@dataclass(frozen=True, kw_only=True)
class Llama(PreNormShape):
    """Shape of a Llama model, beside what `PreNormShape` has.

    Args:
        hidden: width of the SwiGLU; None: 8/3 of the width, rounded up to a multiple of 32.
        qkv_bias: whether the projections to queries, keys and values have biases.
    """

    hidden: int | None = None
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, "model.", "hidden", must="at least 1, or null for 8/3 of the width")

    @property
    def mlp_width(self) -> int:
        return self.hidden or -(-self.width * 8 // 3 // 32) * 32

    @property
    def draw(self) -> str:
        """What draws the first weights; `counter` lets each rank draw its part alone."""
        heads = 2 * (self.heads + self.kv_heads) * self.head_width
        weights = self.layers * self.width * (heads + 3 * self.mlp_width)
        return "counter" if weights >= LARGE else "torch"

    def parameters(self) -> Iterator[ParameterSpec]:
        yield from rotary_ends(self)
        for index in range(self.layers):
            block = pre_norm_parameters(self, gated_mlp_parameters("mlp", "mlp"))
            if self.qkv_bias:
                block += [
                    ParameterSpec(
                        name=f"attention.w{letter}.bias",
                        stored=f"self_attn.{letter}_proj.bias",
                        cut=Split.OUT,
                        initial=ZEROS,
                    )
                    for letter in "qkv"
                ]
            yield from inside(f"blocks.{index}", f"model.layers.{index}", block)

    def build(self, *, vocab_size: int, seq_len: int) -> LlamaModel:
        """The model with weights drawn from torch's default generator, or a large one's by that
        one's seed.

        Raises:
            ValueError: the tokenizer has more ids than `vocab_size`, or a sequence more tokens than
                `max_positions`.
        """
        return LlamaModel(self, vocab_size, seq_len)


class LlamaModel(AttentionDecoder):
    """A Llama of one shape."""

    shape: Llama

    def new_blocks(self) -> Iterator[PreNormBlock]:
        shape = self.shape
        for _ in range(shape.layers):
            mlp = SwiGLU(shape.width, shape.mlp_width)
            yield PreNormBlock(shape, mlp, qkv_bias=shape.qkv_bias)
