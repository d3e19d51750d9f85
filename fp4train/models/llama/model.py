"""Llama: a decoder of RMSNorm, rotary attention with grouped queries, and SwiGLU (arXiv:2302.13971, arXiv:2407.21783).

Parameters are float32 masters; activations take the dtype of the surrounding `autocast` recipe. The linear layers of
the blocks are plain `nn.Linear`s until `fp4train.convert` replaces them. Embedding, norms, attention products and the
head stay in high precision.

Initialisation: normal with σ = 0.02 (capped at 1/√width), the projections that write to the residual stream scaled by
1/√(2·layers) (GPT-2), so that the stream's variance does not grow with depth. All come from torch's generator in
sequence, or each by itself from its name and position (`models/common/initialise.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.models.common.cut import TensorCut
from fp4train.models.common.decoder import Decoder
from fp4train.models.common.initialise import DRAWS, Filled, Initial, Normal, initialise
from fp4train.models.common.layers import Attention, RMSNorm, rope_angles
from fp4train.models.llama.parallel import tensor_cut
from fp4train.precision.context import recompute
from fp4train.text import check_choice

MOST_LAYERS = 4096
"""Largest number of layers; the deepest models have some hundred."""


@dataclass(frozen=True, kw_only=True)
class Llama:
    """Shape of a Llama model.

    Args:
        width: width of the residual stream; heads × head dimension.
        layers: number of blocks.
        heads, kv_heads: numbers of query heads and key/value heads; kv_heads divides heads (grouped-query attention).
        hidden: width of the SwiGLU; None: 8/3 of the width, rounded up to a multiple of 32.
        tied: whether the head shares the weight of the embedding.
        rope_base: θ of the rotary embedding.
        norm_eps: ε of RMSNorm.
        recompute: save only the blocks' inputs for backward and recompute the other activations.
        vocab_multiple: the vocabulary is padded to a multiple of this, which keeps the head's GEMM aligned.
        draw: where initial weights come from. `torch`: torch's generator on the CPU, in sequence. `counter`: each from
            the seed, its parameter's name and its position, so that ranks draw their parts alone; for large models.
    """

    width: int = 128
    layers: int = 6
    heads: int = 2
    kv_heads: int = 1
    hidden: int | None = None
    tied: bool = True
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    recompute: bool = False
    vocab_multiple: int = 64
    draw: str = "torch"

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"model.layers={self.layers} must be at most {MOST_LAYERS}")
        for name in ("rope_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model.{name}={getattr(self, name)} must be finite and above 0")
        check_choice("model.draw", self.draw, DRAWS)
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} is not divisible by model.heads={self.heads}")
        if (self.width // self.heads) % 2:
            raise ValueError(
                f"model.width={self.width} over model.heads={self.heads} is {self.width // self.heads} per head: "
                "rotary embedding needs an even number"
            )
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"model.hidden={self.hidden} must be at least 1, or null for 8/3 of the width")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}")

    @property
    def mlp_width(self) -> int:
        return self.hidden or -(-self.width * 8 // 3 // 32) * 32

    def build(self, *, vocab_size: int, seq_len: int) -> LlamaModel:
        """The model with weights drawn from torch's default generator, or with `draw: counter` by that one's seed."""
        return LlamaModel(self, self._padded(vocab_size), seq_len)

    def parameter_count(self, *, vocab_size: int) -> int:
        """Parameters of the model; tied ones once."""
        attention = self.width * self.width * 2 + self.width * (self.width // self.heads) * self.kv_heads * 2
        block = attention + 3 * self.width * self.mlp_width + 2 * self.width
        tables = self._padded(vocab_size) * self.width * (1 if self.tied else 2)
        return self.layers * block + tables + self.width

    def _padded(self, vocab_size: int) -> int:
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


class MLP(nn.Module):
    """SwiGLU: w_down(silu(w_gate·x) ⊙ w_up·x) (arXiv:2002.05202)."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.attention = Attention(width=shape.width, heads=shape.heads, kv_heads=shape.kv_heads)
        self.mlp_norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE)
        out: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return out


class LlamaModel(Decoder):
    """`forward(tokens, targets)` gives the mean loss in nats per token; `forward(tokens)` the logits.

    As a stage of a pipeline (`stage`) all but the first take the residual stream, and all but the last give it.
    """

    def __init__(self, shape: Llama, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        self.shape, self.vocab_size, self.seq_len = shape, vocab_size, seq_len
        self.embed = nn.Embedding(vocab_size, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, eps=shape.norm_eps)
        self.head = nn.Linear(shape.width, vocab_size, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.cos: Tensor
        self.sin: Tensor
        for name, values in self.initial_buffers().items():
            self.register_buffer(name, values.to(torch.get_default_device()), persistent=False)
        initialise(self, shape.draw)

    def initial_values(self) -> dict[str, Initial]:
        """Normal matrices, and norms that are the identity."""
        std = min(0.02, self.shape.width**-0.5)
        residual = std / (2 * self.shape.layers) ** 0.5
        values: dict[str, Initial] = {}
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                values[name] = Filled(1.0)
            else:
                writes_residual = name.endswith(("attention.wo.weight", "mlp.down.weight"))
                values[name] = Normal(residual if writes_residual else std)
        return values

    def initial_buffers(self) -> dict[str, Tensor]:
        """Cosines and sines of the rotary embedding, which no checkpoint holds."""
        angles = rope_angles(self.seq_len, self.shape.width // self.shape.heads, self.shape.rope_base)
        return {"cos": angles.cos(), "sin": angles.sin()}

    def forward(self, input: Tensor, targets_BT: Tensor | None = None, *, time: int | None = None) -> Tensor:
        """The loss, the logits [B, T, vocabulary], or the residual stream.

        Args:
            input: tokens [B, T]; on a later stage of a pipeline the residual stream [B, T, D], or where tensor-parallel
                ranks share the tokens this rank's rows of it [B·T / p, D].
            targets_BT: tokens.
            time: T, for a later stage; None: the second dimension of `input`.
        """
        time = input.shape[1] if time is None else time
        if time > self.seq_len:
            raise ValueError(f"{time} tokens exceed the model's seq_len={self.seq_len}")
        x = self.enter(input)
        cos, sin = (t[:time].to(x.dtype) for t in (self.cos, self.sin))
        for block in self.blocks:
            x = recompute(block, x, cos, sin) if self.shape.recompute and self.training else block(x, cos, sin)
        return self.leave(x, targets_BT, time)

    def fp4train_tensor_cut(self) -> TensorCut:
        """How tensor parallelism cuts the model."""
        return tensor_cut(len(self.blocks))
