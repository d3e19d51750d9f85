"""Mixers of the blocks of StripedHyena 2 (arXiv:2503.01868): gated convolutions, and attention.

    q, k, v = featuriser(x·W_inᵀ)          a convolution of a few taps per channel; the rows of W_in alternate: q, k, v
    y = q ⊙ (h * (k ⊙ v) + d ⊙ k ⊙ v)      h * …: a causal convolution, each channel by itself
    out = y·W_outᵀ + b

| letter | h | d |
|---|---|---|
| `S` | short: its taps, shared by the channels of a group; the last one multiplies the token itself | none |
| `D` | medium: the same with more taps, the first one multiplies the token itself | per channel |
| `H` | long: implicit, a sum of exponentials per channel, as long as the sequence | per channel |

The projections are linear layers, which `fp4train.convert` replaces. Between them everything is
float32. Parameters have the shapes of the published Evo 2 models.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fp4train.models.common import HoldsParts, KeyValues, rotate, seen_mask
from fp4train.models.common.chunks import SequenceRanks, attend
from fp4train.models.common.convolution import (
    first_of_document,
    long_convolution,
    modal_filter,
    modal_rest,
    modal_state,
    short_convolution,
    transformed,
    with_window,
)
from fp4train.parameters import (
    ZEROS,
    Normal,
    ParameterSpec,
    Split,
    Uniform,
    linear,
)
from fp4train.text import check_least

KINDS = {
    "S": "short convolution",
    "D": "medium convolution",
    "H": "long convolution",
    "*": "attention",
}
TIMES = (2.0, 512.0)
"""The tokens within which the exponentials of a long filter first fall to 1/e, drawn evenly in
their logarithm.
"""
LARGEST_POLE = -1e-5
"""The largest logarithm of a pole: an exponential that grew would overflow."""


@dataclass(frozen=True, kw_only=True)
class FilterShape:
    """Shape of the filters.

    Args:
        featuriser: taps of the convolutions that make q, k and v.
        short, medium: taps of the filters of blocks `S` and `D`.
        groups: filters of blocks `S` and `D`, each for as many channels; divides the width.
        poles: exponentials of each filter of blocks `H`.
    """

    featuriser: int = 3
    short: int = 7
    medium: int = 128
    groups: int = 32
    poles: int = 16

    def __post_init__(self) -> None:
        check_least(self, "model.filters.", "featuriser", "short", "medium", "groups", "poles")

    def parameters(self, kind: str, width: int) -> list[ParameterSpec]:
        """The parameters of a mixer of this kind, with the names that Evo 2's software has for
        them.

        First q, k and v have variance 1 before the featuriser, and filters keep it about as it is.
        A channel is convolved by itself, so a tensor-parallel rank has whole channels with their
        filters (three rows each of what makes q, k and v) or whole heads (with the three parts of
        each), and nothing is sent between them.
        """
        if kind == "*":
            heads = (("heads", "model.heads"),)
            return [
                *linear("qkv", "inner_mha_cls.Wqkv", cut=Split.OUT, counts=heads),
                *linear("out_proj", "inner_mha_cls.out_proj", cut=Split.IN, bias=True),
            ]
        shortest, longest = map(math.log, TIMES)
        poles = Uniform(-longest, -shortest, through=lambda logarithm: -logarithm.exp())
        rows = partial(ParameterSpec, cut=Split.ROWS)
        filters = partial(rows, elementwise=True)
        specs = [
            *linear("in_proj", "projections", cut=Split.OUT, initial=Normal(width**-0.5)),
            filters(
                name="featuriser",
                stored="filter.short_filter_weight",
                initial=_taps(self.featuriser),
            ),
            *linear("out_proj", "out_filter_dense", cut=Split.IN, bias=True),
        ]
        if kind == "H":
            stored = "filter.log_poles"
            specs.append(
                filters(name="log_poles", stored=stored, initial=poles, largest=LARGEST_POLE)
            )
            specs.append(
                filters(name="residues", stored="filter.residues", initial=Normal(1 / self.poles))
            )
        else:
            taps = self.short if kind == "S" else self.medium
            specs.append(filters(name="taps", stored="filter.h", initial=_taps(taps)))
        if kind != "S":
            specs.append(rows(name="direct", stored="filter.D", initial=ZEROS))
        return specs


def _taps(count: int) -> Uniform:
    bound = count**-0.5
    return Uniform(-bound, bound)


class ConvolutionState:
    """Memory of one mixer of the tokens it has seen: the last inputs of its convolutions, of a long
    one the state.
    """

    def __init__(self) -> None:
        self.features_BKC: Tensor | None = None
        self.window_BKC: Tensor | None = None
        self.state_BCN: Tensor | None = None


class GatedConvolution(HoldsParts, nn.Module):
    """A mixer `S`, `D` or `H`: x [B, T, D] → [B, T, D]. Tensor-parallel ranks have channels of
    their own. Ranks that have chunks of the sequence exchange them before the convolutions for all
    tokens in channels of their own, and exchange the products back.
    """

    sequence: SequenceRanks | None = None
    """The ranks that have a chunk of every sequence each; set when sequences are cut."""

    def __init__(self, width: int, kind: str, filters: FilterShape) -> None:
        super().__init__()
        self.kind = kind
        self.width = width
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.featuriser = nn.Parameter(torch.empty(3 * width, 1, filters.featuriser))
        if kind == "H":
            self.log_poles = nn.Parameter(torch.empty(width, filters.poles, 1))
            self.residues = nn.Parameter(torch.empty(width, filters.poles))
        else:
            taps = filters.short if kind == "S" else filters.medium
            self.taps = nn.Parameter(torch.empty(filters.groups, 1, taps))
            self.channels_of_filter = width // filters.groups
        if kind == "S":
            self.direct = None
        else:
            self.direct = nn.Parameter(torch.empty(width))
        self.out_proj = nn.Linear(width, width)

    def fp4train_mixing(self, time: int) -> float:
        """Multiplications per token of Fourier transforms; short filters are counted as weights."""
        taps = time if self.kind == "H" else self.taps.shape[-1]
        if self.kind == "S":
            return 0
        return self.out_proj.weight.shape[1] * transformed(time, taps)

    def forward(
        self,
        x: Tensor,
        time: int,
        kept: ConvolutionState | None = None,
        mask_BTT: Tensor | None = None,
    ) -> Tensor:
        """Tokens follow those in the cache, if there is one; with a mask [B, 1, T, T] filters begin
        where it does.

        Args:
            x: [B, T, D]; where tensor-parallel ranks share the tokens, x and the result are this
                rank's rows [B·T / p, D], and in_proj gives those of all.
            time: T.
        """
        projected = self.in_proj(x)
        projected = projected.view(-1, time, projected.shape[-1])
        channels = projected.shape[-1] // 3
        document_BT = first_of_document(mask_BTT)
        if self.sequence is not None:
            projected = self.sequence.channels(projected, 3)
            if document_BT is not None:
                document_BT = self.sequence.whole_rows(document_BT)
        features, window = short_convolution(
            projected.float(),
            self._of_channels(self.held(self.featuriser)[:, 0], 3),
            window_BKC=None if kept is None else kept.features_BKC,
            document_BT=document_BT,
        )
        if kept is not None:
            kept.features_BKC = window
        q, k, v = features.view(*features.shape[:-1], -1, 3).unbind(-1)
        u = k * v
        y = (self._long if self.kind == "H" else self._explicit)(u, kept, document_BT)
        if self.direct is not None:
            y = y + self._of_channels(self.held(self.direct)) * u
        y = (q * y).to(projected.dtype)
        if self.sequence is not None:
            y = self.sequence.tokens(y, channels)
        out: Tensor = self.out_proj(y)
        return out

    def _of_channels(self, x: Tensor, unit: int = 1) -> Tensor:
        """The rows of x, `unit` for each channel, of the channels that this rank convolves."""
        return x if self.sequence is None else self.sequence.part(x, unit)

    def _explicit(
        self, u_BTC: Tensor, kept: ConvolutionState | None, document_BT: Tensor | None
    ) -> Tensor:
        """Taps * u, and in the cache the last inputs."""
        taps = self.held(self.taps)[:, 0]
        taps = self._of_channels(taps.repeat_interleave(self.channels_of_filter, 0))
        window_before = None if kept is None else kept.window_BKC
        if self.kind == "S":
            y, window = short_convolution(
                u_BTC, taps, window_BKC=window_before, document_BT=document_BT
            )
        elif kept is None:
            return long_convolution(u_BTC, taps, document_BT)
        else:
            time = u_BTC.shape[1]
            kernel = taps.shape[1]
            all_BSC = with_window(u_BTC, window_before, kernel)
            y = long_convolution(all_BSC, taps)[:, kernel - 1 :]
            window = all_BSC[:, time:]
        if kept is not None:
            kept.window_BKC = window
        return y

    def _long(
        self, u_BTC: Tensor, kept: ConvolutionState | None, document_BT: Tensor | None
    ) -> Tensor:
        """The sum of exponentials * u, and in the cache the state."""
        log_poles = self._of_channels(self.held(self.log_poles)[..., 0])
        residues = self._of_channels(self.held(self.residues))
        time = u_BTC.shape[1]
        y = long_convolution(u_BTC, modal_filter(log_poles, residues, time), document_BT)
        if kept is not None:
            if kept.state_BCN is not None:
                y = y + modal_rest(kept.state_BCN, log_poles, residues, time)
            kept.state_BCN = modal_state(u_BTC, log_poles, kept.state_BCN)
        return y


class FusedAttention(nn.Module):
    """Causal attention with rotary positions: [B, T, D] → [B, T, D]. The rows of one weight make q,
    k and v: those of the first head, then those of the second.

    Args:
        width: D.
        heads: their number.
        head_dim: elements of a head.
    """

    sequence: SequenceRanks | None = None
    """The ranks that have a chunk of every sequence each; set when sequences are cut."""

    def __init__(self, *, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.out_proj = nn.Linear(heads * head_dim, width)

    def fp4train_mixing(self, time: int) -> int:
        """Multiplications per token of q·kᵀ and p·v, half of each square."""
        return self.out_proj.weight.shape[1] * time

    def forward(
        self,
        x: Tensor,
        cos_TE: Tensor,
        sin_TE: Tensor,
        kept: KeyValues | None,
        mask_BTT: Tensor | None,
    ) -> Tensor:
        """Tokens follow those in the cache, if there is one; with a mask [B, 1, T, T] a token
        attends to those that it says. If tensor-parallel ranks share the tokens, x and the result
        are this rank's rows [B·T / p, D].
        """
        time = cos_TE.shape[0]
        heads = self.qkv(x).view(-1, time, self.heads, 3, self.head_dim)
        q, k, v = heads.transpose(1, 2).unbind(-2)
        q = rotate(q, cos_TE, sin_TE)
        k = rotate(k, cos_TE, sin_TE)
        causal = mask_BTT is None
        mask = mask_BTT
        if kept is not None:
            k, v = kept.extended(k, v)
            causal = k.shape[2] == time
            mask = seen_mask(time, k.shape[2], k.device)
        y = attend(q, k, v, mask, causal=causal, sequence=self.sequence)
        out: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return out
