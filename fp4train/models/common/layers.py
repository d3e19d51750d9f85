"""Layers that model families share: RMSNorm, rotary positions, causal attention with grouped
queries.

RMSNorm: y = x / √(mean(x²) + ε) ⊙ w over the last dimension (arXiv:1910.07467).

Rotary position embedding (arXiv:2104.09864) has the half-split layout of Llama's public
checkpoints. Pair i of a head consists of the elements i and i + E/2. At position t it is rotated by
t·base^(−2i/E), so the score of a query and a key depends only on the distance between their
positions. Grouped queries: arXiv:2305.13245.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp4train.models.common.cache import KeyValues, seen_mask
from fp4train.models.common.chunks import SequenceRanks, attend
from fp4train.models.common.cut import TokenRanks, shared_by, summed_statistic
from fp4train.models.common.operators import Fusible, Operation
from fp4train.parameters import ParameterSpec, Split, inside, linear, norm


class SharedNorm(nn.RMSNorm):
    """A norm whose whole weight each tensor-parallel rank has."""

    tensor: TokenRanks | None = None
    """The tensor-parallel ranks; with `sequence` they normalise other tokens."""

    @property
    def used_weight(self) -> Tensor:
        """The weight, whose gradient is summed over ranks that normalise other tokens."""
        if self.tensor is None:
            return self.weight
        return shared_by(self.tensor, self.weight)


class RMSNorm(Fusible, SharedNorm):
    """RMSNorm whose float32 weight is cast to the dtype of the activations, so that BF16
    activations stay BF16.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., width]."""
        return self.operators.rms_norm(x, self.used_weight.to(x.dtype), self.eps)

    def fp4train_operations(self) -> Sequence[Operation]:
        """Itself."""
        return (Operation(kind="norm", width=self.weight.shape[-1]),)


class FeaturesNorm(RMSNorm):
    """RMSNorm over features that tensor-parallel ranks may share (`Split.FEATURES`): a rank
    normalises its own by the mean square of all.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x [..., width], of which a rank has its own features."""
        if self.tensor is None:
            return super().forward(x)
        ranks = self.tensor.ranks
        x_float32 = x.float()
        squares = summed_statistic(x_float32.square().sum(-1, keepdim=True), ranks)
        mean = squares / (x.shape[-1] * ranks.size)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normalised = x_float32 * torch.rsqrt(mean + eps) * self.used_weight.to(x.dtype).float()
        return normalised.to(x.dtype)

    def fp4train_operations(self) -> Sequence[Operation]:
        """Itself; of features that ranks share it is torch's."""
        if self.tensor is None:
            return super().fp4train_operations()
        return ()


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slower rotations for longer sequences than a model was first trained with, as in Llama 3.1
    (arXiv:2407.21783).

    A pair that turns at most `low_freq_factor` times within `original_length` tokens turns `factor`
    times slower, one that turns at least `high_freq_factor` times as before; between the two its
    frequency is interpolated.

    Args:
        factor: at least 1.
        low_freq_factor, high_freq_factor: numbers of turns; the second is larger.
        original_length: tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(
                f"model.rope_scaling.factor={self.factor} must be finite and at least 1"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor} must be above 0 "
                "and below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.original_length < 1:
            raise ValueError(
                f"model.rope_scaling.original_length={self.original_length} must be at least 1"
            )

    def __call__(self, frequency: Tensor) -> Tensor:
        """The scaled frequencies, in radians per token like the given ones."""
        turns = self.original_length * frequency / (2 * math.pi)
        kept = (
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ).clamp(0, 1)
        return (1 - kept) * frequency / self.factor + kept * frequency


def rope_angles(
    seq_len: int, head_dim: int, base: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Rotation angles [seq_len, head_dim] in radians, on the CPU; the second half of a row repeats
    the first.
    """
    # on the meta device torch would load its compiler for these few operations
    with torch.device("cpu"):
        inverse = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        inverse = inverse if scaling is None else scaling(inverse)
        angles = torch.outer(torch.arange(seq_len).float(), inverse)
    return torch.cat((angles, angles), dim=-1)


def attention_parameters(name: str, stored: str, *, qk_norm: bool = False) -> list[ParameterSpec]:
    """The parameters of an `Attention`, without biases; `stored` is the module's name in a folder
    of transformers.

    Ranks have whole heads, so that norms of queries and keys normalise their own.
    """
    heads = {"q": (("heads", "model.heads"),), "k": (("kv_heads", "model.kv_heads"),), "v": ()}
    weights = [
        *(
            spec
            for letter, counts in heads.items()
            for spec in linear(
                f"w{letter}",
                f"{letter}_proj",
                cut=Split.OUT,
                fused="qkv",
                counts=counts,
            )
        ),
        *linear("wo", "o_proj", cut=Split.IN),
    ]
    norms = [norm(f"{letter}_norm", f"{letter}_norm.weight", cut=Split.HEADS) for letter in "qk"]
    return [*inside(name, stored, weights + norms if qk_norm else weights)]


class Attention(Fusible, nn.Module):
    """softmax(q·kᵀ/√E + causal mask)·v, with the heads combined by `wo`: x [B, T, D] → [B, T, D].

    The four projections are linear layers, which `fp4train.convert` replaces; the products of
    queries, keys and values stay in the dtype of the activations.

    Args:
        width: D, the width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads; divides `heads`.
        head_dim: E, the elements of a head; None: D / heads.
        qkv_bias: whether the projections to queries, keys and values have a bias, as Qwen2 does.
        qk_norm: ε of an RMSNorm over each head of queries and keys before their rotation, as in
            Qwen3; None: no norm.
    """

    sequence: SequenceRanks | None = None
    """The ranks that have a chunk of every sequence each; set when sequences are cut."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: float | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = width // heads if head_dim is None else head_dim
        self.wq = nn.Linear(width, heads * self.head_dim, bias=qkv_bias)
        self.wk = nn.Linear(width, kv_heads * self.head_dim, bias=qkv_bias)
        self.wv = nn.Linear(width, kv_heads * self.head_dim, bias=qkv_bias)
        self.wo = nn.Linear(heads * self.head_dim, width, bias=False)
        if qk_norm is None:
            self.q_norm = None
        else:
            self.q_norm = RMSNorm(self.head_dim, eps=qk_norm)
        if qk_norm is None:
            self.k_norm = None
        else:
            self.k_norm = RMSNorm(self.head_dim, eps=qk_norm)

    def fp4train_mixing(self, time: int) -> int:
        """Multiplications per token of q·kᵀ and p·v, half of each square."""
        return self.wo.weight.shape[1] * time

    def normed(self, q_BTHE: Tensor, k_BTHE: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as they are rotated: normalised per head, where there are norms."""
        if self.q_norm is None or self.k_norm is None:
            return q_BTHE, k_BTHE
        return self.q_norm(q_BTHE), self.k_norm(k_BTHE)

    def forward(
        self,
        x: Tensor,
        cos_TE: Tensor | None,
        sin_TE: Tensor | None,
        cache: KeyValues | None = None,
        mask_BTT: Tensor | None = None,
        *,
        time: int | None = None,
    ) -> Tensor:
        """Attention within each sequence; `cos_TE` and `sin_TE` are those of `rope_angles` for its
        T positions; None: heads are not rotated, and there are `time` positions.

        With a cache the tokens follow those in it, attend to them too, and are added to it. With a
        mask, bool [B, 1, T, T], a token attends to those that the mask says. If tensor-parallel
        ranks share the tokens, x and the result are this rank's rows [B·T / p, D].
        """
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if time is None:
            if cos_TE is None:
                time = q.shape[1]
            else:
                time = cos_TE.shape[0]
        q = q.view(-1, time, self.heads, self.head_dim)
        k = k.view(-1, time, self.kv_heads, self.head_dim)
        q, k = self.normed(q, k)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.view(-1, time, self.kv_heads, self.head_dim).transpose(1, 2)
        if cos_TE is not None and sin_TE is not None:
            q, k = self.operators.rotate(q, k, cos_TE, sin_TE)
        causal = mask_BTT is None
        mask = mask_BTT
        if cache is not None:
            k, v = cache.extended(k, v)
            causal = k.shape[2] == time
            mask = seen_mask(time, k.shape[2], k.device)
        y = attend(q, k, v, mask, causal=causal, sequence=self.sequence)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out
