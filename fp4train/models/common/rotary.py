"""Decoders of rotary attention and an MLP per block: what Llama and its relatives with experts
share.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.models.common.cache import DecodeCache, KeyValues
from fp4train.models.common.decoder import FamilyDecoder
from fp4train.models.common.layers import (
    Attention,
    RMSNorm,
    RopeScaling,
    attention_parameters,
    rope_angles,
)
from fp4train.models.common.operators import Fusible, Operation
from fp4train.models.common.shape import DecoderShape
from fp4train.parameters import Computed, ParameterSpec, Split, inside, linear, norm

MOST_LAYERS = 4096
"""Largest number of layers; the deepest models have some hundred."""


@dataclass(frozen=True, kw_only=True)
class RotaryShape(DecoderShape):
    """Shape of a family with rotary attention in every block: the fields that these have beside
    those of `DecoderShape`.

    Args:
        layers: number of blocks.
        rope_base: θ of the rotary embedding.
        rope_scaling: slower rotations for long sequences; None: those of `rope_base`.
    """

    layers: int = 6
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None

    @property
    def residual_terms(self) -> int:
        return 2 * self.layers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1:
            raise ValueError(f"model.layers={self.layers} must be at least 1")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"model.layers={self.layers} must be at most {MOST_LAYERS}")
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"model.rope_base={self.rope_base} must be finite and above 0")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(
                f"model.head_dim={self.head_dim}: rotary embedding needs an even number"
            )
        if self.head_width % 2:
            raise ValueError(
                f"model.width={self.width} over model.heads={self.heads} is "
                f"{self.width // self.heads} per head: "
                "rotary embedding needs an even number"
            )


@dataclass(frozen=True, kw_only=True)
class PreNormShape(RotaryShape):
    """Shape of a family of `PreNormBlock`s: Llama and its relatives.

    Args:
        qk_norm: whether the heads of queries and keys are normalised (RMSNorm) before they are
            rotated.
    """

    qk_norm: bool = False


def gated_mlp_parameters(
    name: str,
    stored: str,
    places: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[ParameterSpec]:
    """The parameters of a gated MLP.

    Args:
        stored: name of the module in a folder.
        places: names of its layers there.
    """
    names = dict(zip(("gate", "up", "down"), places, strict=True))
    into = partial(linear, cut=Split.OUT, fused="gate and up")
    specs = [
        *into("gate", names["gate"]),
        *into("up", names["up"]),
        *linear("down", names["down"], cut=Split.IN),
    ]
    return [*inside(name, stored, specs)]


def rotary_ends(shape: RotaryShape, *, copied: bool = False) -> list[ParameterSpec]:
    """The parameters outside of the blocks, with the names that Llama has in transformers; see
    `DecoderShape.ends`.
    """
    return shape.ends(
        embed="model.embed_tokens.weight",
        norm="model.norm.weight",
        head="lm_head.weight",
        copied=copied,
    )


class SwiGLU(Fusible, nn.Module):
    """w_down(silu(w_gate·x) ⊙ w_up·x) (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y: Tensor = self.down(self.operators.silu_product(self.gate(x_BTD), self.up(x_BTD)))
        return y

    def fp4train_operations(self) -> Sequence[Operation]:
        """The product."""
        return (Operation(kind="gate", width=self.gate.weight.shape[0]),)


def pre_norm_parameters(
    shape: PreNormShape,
    mlp: Iterable[ParameterSpec],
    *,
    attention: str = "self_attn",
    attention_norm: str = "input_layernorm",
    mlp_norm: str = "post_attention_layernorm",
) -> list[ParameterSpec]:
    """The parameters of a `PreNormBlock`.

    Args:
        mlp: parameters of its MLP, named as in the block.
        attention, attention_norm, mlp_norm: names of these modules in a folder, as Llama's are in
            transformers.
    """
    return [
        norm("attention_norm", f"{attention_norm}.weight"),
        norm("mlp_norm", f"{mlp_norm}.weight"),
        *attention_parameters("attention", attention, qk_norm=shape.qk_norm),
        *mlp,
    ]


class RotaryBlock(Fusible, nn.Module, ABC):
    """x + attended(x), then x + transformed(x)."""

    attention: Attention
    rotated = True
    """Whether queries and keys are rotated; a block without positions says no."""

    @abstractmethod
    def attended(self, x_BTD: Tensor, *rotation_and_cache: Any, time: int) -> Tensor:
        """The term of the attention, with what `Attention.forward` takes behind x."""

    @abstractmethod
    def transformed(self, x_BTD: Tensor, time: int) -> Tensor:
        """The term of the MLP.

        Args:
            time: T, which x does not tell where tensor-parallel ranks share the tokens.
        """

    def fp4train_operations(self) -> Sequence[Operation]:
        """The rotation of queries and keys."""
        if not self.rotated:
            return ()
        return (Operation(kind="rotation", width=self.attention.head_dim),)

    def forward(
        self,
        x_BTD: Tensor,
        cos_TE: Tensor,
        sin_TE: Tensor,
        cache: KeyValues | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        time = cos_TE.shape[0]
        rotation = (cos_TE, sin_TE) if self.rotated else (None, None)
        x_BTD = x_BTD + self.attended(x_BTD, *rotation, cache, mask, time=time)
        return x_BTD + self.transformed(x_BTD, time)


class PreNormBlock(RotaryBlock):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: PreNormShape, mlp: nn.Module, *, qkv_bias: bool = False) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(
            width=shape.width,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_width,
            qkv_bias=qkv_bias,
            qk_norm=shape.norm_eps if shape.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = mlp

    def attended(self, x_BTD: Tensor, *rotation_and_cache: Any, time: int) -> Tensor:
        n_BTD = self.attention_norm(x_BTD)
        y_BTD: Tensor = self.attention(n_BTD, *rotation_and_cache, time=time)
        return y_BTD

    def transformed(self, x_BTD: Tensor, time: int) -> Tensor:
        y_BTD: Tensor = self.mlp(self.mlp_norm(x_BTD))
        return y_BTD


class RotaryDecoder(FamilyDecoder):
    """A decoder whose blocks get cosines and sines of the rotary embedding, buffers that no
    checkpoint holds.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DecoderShape, vocab_size: int, seq_len: int) -> None:
        super().__init__(shape, vocab_size, seq_len)
        angles = self._angles()
        for name, values in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, values.to(torch.get_default_device()), persistent=False)

    def _angles(self) -> Tensor:
        shape: Any = self.shape
        scaling: RopeScaling | None = getattr(shape, "rope_scaling", None)
        return rope_angles(self.seq_len, shape.head_width, shape.rope_base, scaling)

    def computed(self) -> list[ParameterSpec]:
        """Cosines and sines of the rotary embedding."""
        return [
            ParameterSpec(name="cos", initial=Computed(lambda: self._angles().cos())),
            ParameterSpec(name="sin", initial=Computed(lambda: self._angles().sin())),
        ]

    def positions(self, first: int, end: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Cosines and sines of the rotary embedding, [T, E] each."""
        return self.cos[first:end].to(dtype), self.sin[first:end].to(dtype)


class AttentionDecoder(RotaryDecoder):
    """A decoder whose blocks are all rotary attention and an MLP."""

    takes_chunks = True

    def fp4train_cache(self, length: int) -> DecodeCache:
        """Keys and values of each block."""
        return DecodeCache([KeyValues(length) for _ in self.blocks])
