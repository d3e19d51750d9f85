"""Mamba-2: a state-space recurrence as chunked matrix products (SSD, arXiv:2405.21060).

Per head, with the state h [P, N], and B and C shared by the heads of a group:

    h_t = exp(a_t)·h_{t−1} + x_t·B_tᵀ,   y_t = h_t·C_t        a_t ≤ 0

Within a chunk of L tokens this is a masked product, (C·Bᵀ ⊙ decay)·x; a loop passes the state from
chunk to chunk. All of it is float32, but for the sums of a (`SegmentSums`): what a recipe quantises
are the linear layers before and after. On GPUs that have mamba-ssm its kernels compute it
(`scan_kernels.py`).

Dimensions: B batch, T time, D width, H heads, P elements of a head, G groups, N elements of the
state, C chunks, L tokens of a chunk, R heads of a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4train.keys import CHANGES_DIGITS
from fp4train.models.common import scan_kernels
from fp4train.models.common.chunks import SequenceRanks
from fp4train.models.common.convolution import first_of_document, short_convolution
from fp4train.models.common.cut import HoldsParts
from fp4train.models.common.operators import Operation
from fp4train.models.common.scan_kernels import CHOICES
from fp4train.models.common.untraced import untraced
from fp4train.parameters import ONES, Initial, Numbered, ParameterSpec, Split, Uniform, linear
from fp4train.text import check_choice, check_least

STEP = (1e-3, 0.1)
"""The range of the first time steps, drawn evenly in their logarithm (arXiv:2312.00752, section
3.6).
"""


def step_before_softplus(logarithm: Tensor) -> Tensor:
    """What softplus turns into the time step with this logarithm."""
    step = logarithm.exp()
    return step + (-torch.expm1(-step)).log()


def running_sums(a: Tensor) -> Tensor:
    """Σ of each element of a and those before it, along the last dimension.

    torch has no deterministic running sum of floats on GPUs: where `train.deterministic` asks for
        one, log₂ L sums of
    two shifted tensors are taken instead.
    """
    if not _needs_order(a):
        return a.cumsum(-1)
    step = 1
    while step < a.shape[-1]:
        a = torch.cat((a[..., :step], a[..., step:] + a[..., :-step]), -1)
        step *= 2
    return a


def _needs_order(a: Tensor) -> bool:
    return a.is_cuda and torch.are_deterministic_algorithms_enabled()


class SegmentSums(torch.autograd.Function):
    """Sums of a over the tokens after s up to t, for t ≥ s: [..., L] → [..., L, L], of which
    element [t, s] is Σ a_k over s < k ≤ t. What stands above the diagonal means nothing.

    Differences of running sums are these sums, but for what rounding leaves of sums that are much
        larger: they are
    taken in float64. Their gradient taken in the same way loses all digits where decays are strong:
    it would subtract the diagonal's gradients, which depend on no a, from themselves. So each a
    gets the gradients of the sums that it is part of, and no others, as
    `_chunk_scan_bwd_ddAcs_stable` of mamba-ssm adds them.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        sums = running_sums(a.double())
        return (sums[..., :, None] - sums[..., None, :]).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # [t, k − 1]: of the sums up to t that begin before k
        begun_earlier = running_sums(gradient.tril(-1)).tril(-1)
        return F.pad(begun_earlier.sum(-2)[..., :-1], (1, 0))


def scan(
    x_BTHP: Tensor,
    a_BTH: Tensor,
    b_BTGN: Tensor,
    c_BTGN: Tensor,
    *,
    chunk: int,
    state_BHPN: Tensor | None = None,
    document_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, T, H, P], the state after the last token [B, H, P, N]), in the dtype of x.

    Args:
        a_BTH: logarithms of the decays, at most 0.
        chunk: tokens of a chunk; the last one is padded with tokens that change nothing.
        state_BHPN: before the first token; None: zeros.
        document_BT: a number per token; the state is zero where it changes. None: it never does.
    """
    batch, time, heads, dim = x_BTHP.shape
    groups, size = b_BTGN.shape[2:]
    pad = -time % chunk
    per = heads // groups
    if pad:
        x_BTHP, b_BTGN, c_BTGN = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x_BTHP, b_BTGN, c_BTGN))
        a_BTH = F.pad(a_BTH, (0, 0, 0, pad))
    # [B, C, G, R, L, P]
    x = x_BTHP.view(batch, -1, chunk, groups, per, dim).permute(0, 1, 3, 4, 2, 5)
    a = a_BTH.view(batch, -1, chunk, groups, per).permute(0, 1, 3, 4, 2)  # [B, C, G, R, L]
    b = b_BTGN.view(batch, -1, chunk, groups, size).transpose(2, 3)  # [B, C, G, L, N]
    c = c_BTGN.view(batch, -1, chunk, groups, size).transpose(2, 3)
    segments: Tensor = SegmentSums.apply(a)  # type: ignore[no-untyped-call]
    to_end = segments[..., -1, :].exp()
    from_start = running_sums(a).exp()
    chunk_decay = from_start[..., -1]
    sees = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    if document_BT is not None:
        document = torch.cat((document_BT, document_BT[:, -1:].expand(-1, pad)), 1).view(
            batch, -1, 1, 1, chunk
        )
        last = document[..., -1:]
        # of the state that enters a chunk
        entering = torch.cat((document[:, :1, ..., :1], last[:, :-1]), 1)
        sees = sees & (document[..., :, None] == document[..., None, :])
        to_end = to_end * (document == last)
        from_start = from_start * (document == entering)
        chunk_decay = chunk_decay * (last == entering)[..., 0]
    decay = segments.masked_fill(~sees, -torch.inf).exp()  # [B, C, G, R, L, L]
    inside = ((c @ b.mT)[:, :, :, None] * decay) @ x
    added = (to_end[..., None] * x).mT @ b[:, :, :, None]  # [B, C, G, R, P, N]
    if state_BHPN is None:
        h = x.new_zeros(added[:, 0].shape)
    else:
        h = state_BHPN.view(batch, groups, per, dim, size)
    states = []
    for i in range(added.shape[1]):
        states.append(h)
        h = h * chunk_decay[:, i, ..., None, None] + added[:, i]
    across = (c[:, :, :, None] * from_start[..., None]) @ torch.stack(states, 1).mT
    y = (inside + across).permute(0, 1, 4, 2, 3, 5)  # [B, C, L, G, R, P]
    return y.reshape(batch, -1, heads, dim)[:, :time], h.reshape(batch, heads, dim, size)


class ScanState:
    """Memory of one Mamba-2 layer of the tokens it has seen: its state, and the last inputs of its
    convolution.
    """

    def __init__(self) -> None:
        self.state_BHPN: Tensor | None = None
        self.window_BKC: Tensor | None = None


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


class Mamba2(HoldsParts, nn.Module):
    """out_proj(norm(scan(silu(conv(x, B, C))) ⊙ silu(z))), with z, x, B, C and dt from in_proj: [B,
    T, D] → [B, T, D].

    The two projections are linear layers, which `fp4train.convert` replaces. The parameters have
    the names and shapes of `transformers`.

    Args:
        width: D.
        eps: ε of the norm, which normalises the channels of each group.
    """

    sequence: SequenceRanks | None = None
    """The ranks that have a chunk of every sequence each; set when sequences are cut."""

    def __init__(self, shape: ScanShape, *, width: int, eps: float) -> None:
        super().__init__()
        self.kernels = shape.kernels
        if shape.kernels == "auto":
            self.missing = scan_kernels.missing()
        else:
            self.missing = (shape.kernels, shape.kernels)
        """Reasons why this process cannot call kernels for the scan and the convolution."""
        self.heads = heads = shape.heads
        self.groups = shape.groups
        self.chunk = shape.chunk
        self.eps = eps
        self.least_step = shape.least_step
        self.head_dim = shape.head_dim
        self.state = shape.state
        inner = heads * shape.head_dim
        mixed = sum(self.mixed_sizes)
        self.in_proj = nn.Linear(width, sum(self.segments), bias=False)
        self.conv1d = CausalConvolution(mixed, shape.kernel)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = NormWeight(inner)
        self.out_proj = nn.Linear(inner, width, bias=False)

    @property
    def mixed_sizes(self) -> list[int]:
        """Channels of x, B and C, which the convolution mixes; of this rank's heads and groups."""
        return [self.heads * self.head_dim, self.groups * self.state, self.groups * self.state]

    @property
    def taps(self) -> int:
        """Tokens of the convolution."""
        return self.conv1d.weight.shape[-1]

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows of in_proj for z, x, B, C and dt."""
        return self.heads * self.head_dim, *self.mixed_sizes, self.heads

    def fp4train_mixing(self, time: int) -> int:
        """Multiplications per token of the scan: C·Bᵀ and its product with x in a chunk, those into
        and out of the state; the last chunk is padded.
        """
        inner = self.out_proj.weight.shape[1]
        per_token = self.chunk * (self.conv1d.weight.shape[0] + inner) // 2 + 2 * inner * self.state
        return -(-time // self.chunk) * self.chunk * per_token // time

    def forward(
        self,
        x: Tensor,
        time: int,
        kept: ScanState | None = None,
        mask_BTT: Tensor | None = None,
    ) -> Tensor:
        """Tokens follow those in the cache, if there is one; with a mask [B, 1, T, T] the state
        begins where it does.

        Args:
            x: [B, T, D]; where tensor-parallel ranks share the tokens, x and the result are this
                rank's rows [B·T / p, D], and in_proj gives those of all.
            time: T.
        """
        projected_BTN = self.in_proj(x)
        document_BT = first_of_document(mask_BTT)
        inner = self.heads * self.head_dim
        mixed_size = sum(self.mixed_sizes)
        dtype = projected_BTN.dtype
        projected_BTN = projected_BTN.view(-1, time, projected_BTN.shape[-1])
        z, mixed, dt = torch.split(projected_BTN, [inner, mixed_size, self.heads], -1)
        deterministic = torch.are_deterministic_algorithms_enabled()
        no_scan, no_convolution = self.missing
        fused = kept is None and self.sequence is None and no_scan is None
        fused = (
            fused
            and scan_kernels.why_torch(self.kernels, projected_BTN.device.type, deterministic)
            is None
        )
        convolves = fused and no_convolution is None
        if convolves and scan_kernels.why_torch_convolves(self.taps, mixed_size) is None:
            weight = self.held(self.conv1d.weight)[:, 0]
            bias = self.held(self.conv1d.bias)
            convolve = untraced(scan_kernels.silu_of_convolution)
            mixed = convolve(mixed.float(), weight, bias, document_BT)
            window = None
        else:
            mixed = mixed.float()
            first = 0
            inputs = None if kept is None else kept.window_BKC
            if self.sequence is not None:
                first = self.sequence.first(mixed)
                inputs = self.sequence.window(mixed, self.taps - 1)
            mixed, window = self.conv1d(mixed, inputs, document_BT, first)
            mixed = F.silu(mixed)
        x, b, c = torch.split(mixed, self.mixed_sizes, -1)
        x = x.reshape(*x.shape[:2], self.heads, -1)
        b, c = (t.reshape(*t.shape[:2], self.groups, -1) for t in (b, c))
        dt = F.softplus(dt.float() + self.held(self.dt_bias)).clamp(min=self.least_step)
        a_H = -self.held(self.A_log).exp()
        if fused:
            y = untraced(scan_kernels.scan)(x, dt, a_H, b, c, self.chunk, document_BT)
        else:
            y, state = scan(
                x * dt[..., None],
                a_H * dt,
                b,
                c,
                chunk=self.chunk,
                state_BHPN=None if kept is None else kept.state_BHPN,
                document_BT=document_BT,
            )
            if self.sequence is not None:
                y = y + self._of_earlier_chunks(state, a_H * dt, c, document_BT)
            if kept is not None:
                kept.state_BHPN = state
                kept.window_BKC = window
        y = (y + self.held(self.D)[:, None] * x).flatten(2) * F.silu(z.float())
        y = y.view(*y.shape[:2], self.groups, -1)
        y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).flatten(-2)
        out: Tensor = self.out_proj((self.held(self.norm.weight) * y).to(dtype))
        return out

    def _of_earlier_chunks(
        self, state_BHPN: Tensor, a_BTH: Tensor, c_BTGN: Tensor, document_BT: Tensor | None
    ) -> Tensor:
        """The term of y of the tokens in the chunks of ranks before, [B, T, H, P].

        Args:
            state_BHPN: after this chunk, from zeros before it.
            document_BT: the position at which each token's document begins.
        """
        assert self.sequence is not None
        decay_BTH = running_sums(a_BTH.mT).exp().mT
        if document_BT is not None:
            decay_BTH = decay_BTH * (document_BT < self.sequence.first(a_BTH))[..., None]
        state_BHPN = self.sequence.entering(state_BHPN, decay_BTH[:, -1])
        state_BGRN = state_BHPN.reshape(state_BHPN.shape[0], self.groups, -1, self.state)
        y_BTGR = (c_BTGN.transpose(1, 2) @ state_BGRN.mT).transpose(1, 2)
        y: Tensor = y_BTGR.reshape(*decay_BTH.shape, -1) * decay_BTH[..., None]
        return y

    def fp4train_operations(self) -> Sequence[Operation]:
        """The scan."""
        width = self.heads * self.head_dim
        return (Operation(kind="scan", width=width, software=self._software),)

    def _software(self, device: str, deterministic: bool) -> str:
        """Software that computes the scan and its convolution on devices of this type, in words."""
        why = scan_kernels.why_torch(self.kernels, device, deterministic)
        if self.sequence is not None:
            why = "mamba-ssm's kernels begin with no state, and parallel.cp cuts sequences"
        if why := why or scan_kernels.why_missing(scan_kernels.SCAN):
            return f"scans by torch: {why}"
        why = scan_kernels.why_torch_convolves(self.taps, sum(self.mixed_sizes))
        why = why or scan_kernels.why_missing(scan_kernels.CONVOLUTION)
        if why:
            convolution = f"torch: {why}"
        else:
            convolution = scan_kernels.version(scan_kernels.CONVOLUTION)
        return (
            f"scans by {scan_kernels.version(scan_kernels.SCAN)}, their convolutions by "
            f"{convolution}"
        )


class NormWeight(nn.Module):
    """The weight of a norm by itself, under the name that a layer of it has in `transformers`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class CausalConvolution(HoldsParts, nn.Conv1d):
    """y_t = bias + Σ_k weight_k ⊙ x_{t − K + 1 + k}, each channel by itself. Its model draws the
    first weights.
    """

    bias: nn.Parameter

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__(channels, channels, kernel, groups=channels)

    def reset_parameters(self) -> None:
        """Nothing is drawn."""

    def forward(  # type: ignore[override]
        self,
        x_BTC: Tensor,
        window_BKC: Tensor | None,
        document_BT: Tensor | None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """`short_convolution` with the weight and bias."""
        weight = self.held(self.weight)[:, 0]
        bias = self.held(self.bias)
        return short_convolution(
            x_BTC, weight, bias, window_BKC=window_BKC, document_BT=document_BT, first=first
        )
