"""A mixture of experts: Llama's decoder, whose MLPs are experts that a router chooses from
(arXiv:2101.03961).

With softmax scores and no shared expert it is Mixtral (arXiv:2401.04088) or, with norms of queries
and keys, Qwen3-MoE (arXiv:2505.09388); with sigmoid scores, a bias, a shared expert and dense first
blocks it has the experts of DeepSeek-V3 (arXiv:2412.19437), as GLM-4-MoE has them.
`models/common/experts.py` says what a layer of experts computes.

Linear layers and experts follow the recipe. Routers are computed in float32; embedding, norms,
attention products and the head stay in high precision. First weights are drawn by counter, as those
of Llama; biases of routers begin at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fp4train.models.common import (
    AttentionDecoder,
    Balance,
    ExpertShape,
    PreNormBlock,
    PreNormShape,
    Routers,
    SwiGLU,
    gated_mlp_parameters,
    pre_norm_parameters,
    rotary_ends,
)
from fp4train.models.common.experts import ExpertLayer, expert_parameters
from fp4train.parameters import ParameterSpec, inside


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts(PreNormShape):
    """Shape of a mixture of experts, beside what `PreNormShape` has.

    Args:
        dense: number of first blocks that have an MLP in place of experts.
        hidden: width of the MLPs of those blocks.
        experts: shape of the layers of experts.
        balance: method that keeps their load even.
    """

    dense: int = 0
    hidden: int = 384
    experts: ExpertShape = field(default_factory=ExpertShape)
    balance: Balance = field(default_factory=Balance)
    draw: ClassVar[str] = "counter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < 1:
            raise ValueError(f"model.hidden={self.hidden} must be at least 1")
        if not 0 <= self.dense < self.layers:
            raise ValueError(
                f"model.dense={self.dense} must lie from 0 to below model.layers={self.layers}"
            )
        if self.balance.speed and not self.experts.bias:
            raise ValueError(
                f"model.balance.speed={self.balance.speed} moves a bias that the routers do "
                "not have: add "
                "model.experts.bias=true, or set it to 0"
            )

    @property
    def is_mixtral(self) -> bool:
        """Whether its folder is one of Mixtral, which has names of its own for the experts."""
        return self.experts.scores == "softmax" and not self.qk_norm

    def parameters(self) -> Iterator[ParameterSpec]:
        # GLM-4-MoE has a head of its own, also where it is tied to the embedding.
        yield from rotary_ends(self, copied=self.experts.scores == "sigmoid")
        for index in range(self.layers):
            if index < self.dense:
                mlp = gated_mlp_parameters("mlp", "mlp")
            elif self.is_mixtral:
                mlp = expert_parameters("mlp", "block_sparse_moe", self.experts, ("w1", "w3", "w2"))
            else:
                mlp = expert_parameters("mlp", "mlp", self.experts)
            block = pre_norm_parameters(self, mlp)
            yield from inside(f"blocks.{index}", f"model.layers.{index}", block)

    def build(self, *, vocab_size: int, seq_len: int) -> MixtureModel:
        """The model with weights drawn by counter from the seed of torch's default generator.

        Raises:
            ValueError: the tokenizer has more ids than `vocab_size`, or a sequence more tokens than
                `max_positions`.
        """
        return MixtureModel(self, vocab_size, seq_len)


class ExpertBlock(PreNormBlock):
    """A block whose MLP is a layer of experts."""

    def transformed(self, x_BTD: Tensor, time: int) -> Tensor:
        y_BTD: Tensor = self.mlp(self.mlp_norm(x_BTD), time)
        return y_BTD


class MixtureModel(AttentionDecoder):
    """A mixture of experts of one shape."""

    shape: MixtureOfExperts

    def new_blocks(self) -> Iterator[PreNormBlock]:
        shape = self.shape
        for index in range(shape.layers):
            if index < shape.dense:
                yield PreNormBlock(shape, SwiGLU(shape.width, shape.hidden))
            else:
                yield ExpertBlock(shape, ExpertLayer(shape.width, shape.experts, shape.balance))

    def fp4train_routers(self) -> Routers:
        """The routers that this part of the model has, under the numbers of their blocks in the
        whole model.
        """
        layers = {
            int(index): block.mlp.router
            for index, block in self.blocks.named_children()
            if isinstance(block, PreNormBlock) and isinstance(block.mlp, ExpertLayer)
        }
        return Routers(blocks=self.shape.layers, experts=self.shape.experts.count, here=layers)
