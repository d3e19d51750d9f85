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

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.keys import CHANGES_DIGITS
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
from fp4train.models.common.scan import STEP, Mamba2, ScanState, step_before_softplus
from fp4train.models.common.scan_kernels import CHOICES
from fp4train.parameters import (
    ONES,
    Initial,
    Numbered,
    ParameterSpec,
    Split,
    Uniform,
    inside,
    linear,
    norm,
)
from fp4train.text import check_choice, check_least

KINDS = {"M": "Mamba-2", "*": "attention", "-": "MLP"}


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """Shape of a Mamba-2 block.

    Args:
        heads, head_dim: sizes of the scan; the inner width is their product.
        state: elements of a head's state per element of the head.
        groups: heads that share B and C; divides `heads`.
        kernel: tokens of the convolution.
        chunk: tokens that are multiplied at once; changes the order of sums, not the function.
        least_step: the smallest time step.
        kernels: `auto`: those of mamba-ssm where they can be used
            (`models/common/scan_kernels.py`); `torch`: none.
    """

    heads: int = 4
    head_dim: int = 64
    state: int = 32
    groups: int = 1
    kernel: int = 4
    chunk: int = 64
    least_step: float = 0.0
    kernels: Annotated[str, CHANGES_DIGITS] = "auto"

    def __post_init__(self) -> None:
        check_least(self, "model.scan.", "heads", "head_dim", "state", "groups", "kernel", "chunk")
        check_least(self, "model.scan.", "kernel", least=2)
        if self.chunk > 4096:
            raise ValueError(
                f"model.scan.chunk={self.chunk} must be at most 4096: memory grows with its square"
            )
        if self.heads % self.groups:
            raise ValueError(
                f"model.scan.heads={self.heads} is not divisible by model.scan.groups={self.groups}"
            )
        if not 0 <= self.least_step < math.inf:
            raise ValueError(
                f"model.scan.least_step={self.least_step} must be finite and not negative"
            )
        check_choice("model.scan.kernels", self.kernels, CHOICES)

    def parameters(self) -> list[ParameterSpec]:
        """The parameters of a `Mamba2`, which has the names of transformers (initial values:
        arXiv:2405.21060's code).

        A tensor-parallel rank has whole groups of the scan with their heads, in each segment of
        `in_proj` (z, x, B, C and dt) and of the convolution (x, B and C). So it normalises whole
        groups, and the scan sends nothing. Weight decay spares the filters, as it does those of
        Hyena (and NeMo's `hyena_no_weight_decay_cond`); the code of Mamba-2 and Megatron-LM, which
        spare parameters of one dimension and those that are marked, decay them.
        """
        inner = self.heads * self.head_dim
        mixed = (inner, self.groups * self.state, self.groups * self.state)
        taps = Uniform(-(self.kernel**-0.5), self.kernel**-0.5)
        shortest, longest = map(math.log, STEP)
        of_heads: dict[str, Initial] = {
            "dt_bias": Uniform(shortest, longest, through=step_before_softplus),
            "A_log": Numbered(lambda number: (number + 1).log()),
            "D": ONES,
            "norm.weight": ONES,
        }
        counts = (("groups", "model.scan.groups"), ("heads", "model.scan.heads"))
        rows = partial(ParameterSpec, cut=Split.ROWS)
        filters = partial(rows, segments=mixed, initial=taps)
        return [
            *linear(
                "in_proj",
                "in_proj",
                cut=Split.OUT,
                segments=(inner, *mixed, self.heads),
                counts=counts,
            ),
            filters(name="conv1d.weight", stored="conv1d.weight", elementwise=True),
            filters(name="conv1d.bias", stored="conv1d.bias"),
            *(rows(name=name, stored=name, initial=initial) for name, initial in of_heads.items()),
            *linear("out_proj", "out_proj", cut=Split.IN),
        ]


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
            self.mixer = Mamba2(width=shape.width, eps=shape.norm_eps, **asdict(shape.scan))
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

    shape: Hybrid

    def new_blocks(self) -> Iterator[HybridBlock]:
        return (HybridBlock(self.shape, kind) for kind in self.shape.pattern)

    def positions(self, first: int, end: int, dtype: torch.dtype) -> tuple[int]:
        """The number of tokens: ranks that share them do not see it."""
        return (end - first,)

    def fp4train_cache(self, length: int) -> DecodeCache:
        """Keys and values, or the state of a scan, of each block."""
        return DecodeCache([cast(HybridBlock, block).cache(length) for block in self.blocks])
