"""Outlier channels of one layer: their norms, the choice, and the call that multiplies them apart.

The state of a layer is the sum over the recorded steps of the norm of each input channel, and the number of steps. A
step's norm is √(Σ x²) over all its tokens: over the calls of the step (microbatches) and, with data parallelism, over
the ranks. The calls of the last recorded step multiply all channels together; those of later steps in two parts. The
channels of a part are in the order of their sums, the largest first, of equal sums the first.

The random bits of both parts are those of one layer whose channels are in this order: the outlier channels lie behind
the others. So no two elements of w or x share their bits, and dy, which both parts multiply, is rounded alike in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4train.nn.call import Call
from fp4train.nn.gathered import Gathered
from fp4train.nn.gemms import Gradients, LayerGemms, gradients_of, torch_autocasts, without_torchs_autocast
from fp4train.nn.place import Place
from fp4train.nn.scaling import Position
from fp4train.nn.weights import PreparedWeights
from fp4train.precision.plan import LayerPlan, apart
from fp4train.precision.recipe import OutlierChannels
from fp4train.quantize import Quantized

_SPREAD = 8
"""Neighbouring columns that share a draw of the random generator: a part begins at a multiple of it."""

NORMS, STEPS = "outliers.norms", "outliers.steps"
"""Names in a checkpoint: float64 [in_features], and int64 0-d."""


class OutlierNorms:
    """The norms of one layer's input channels, and the channels chosen by them.

    Attributes:
        joined: the loop sums the squares of all layers over the ranks (`join_squares`); else each call does so over the
            default process group by itself.
    """

    def __init__(self) -> None:
        self.joined = False
        self.latest: tuple[Tensor, Tensor] | None = None
        """(the other channels, the outlier channels) of the last call; None: it multiplied all channels together."""
        self._norms: Tensor | None = None
        self._squares: Tensor | None = None
        self._steps = 0
        self._position: Position | None = None
        self._open = False
        self._channels: dict[int, tuple[Tensor, Tensor]] = {}

    def begun(self, outliers: OutlierChannels, position: Position) -> bool:
        """Whether calls at `position` (seed and step) multiply outlier channels apart."""
        return self._steps >= outliers.steps and position != self._position

    def due(self, outliers: OutlierChannels, position: Position) -> bool:
        """Whether calls at `position`, which multiply all channels together, are recorded."""
        return position[1] >= outliers.start and (self._steps < outliers.steps or position == self._position)

    def record(self, x_MK: Tensor, position: Position) -> None:
        """The tokens of one call of the step at `position` enter the norms."""
        squares = x_MK.detach().float().square().sum(0, dtype=torch.float64)
        if not self.joined and dist.is_available() and dist.is_initialized():
            dist.all_reduce(squares)
        if position == self._position and self._squares is not None:
            self._squares = self._squares + squares
        else:
            self._norms, self._squares = self._sums(x_MK), squares
            self._steps, self._position = self._steps + 1, position
        self._open = True
        self._channels.clear()

    def channels(self, count: int, device: str | torch.device) -> tuple[Tensor, Tensor]:
        """(the other channels, the `count` outlier channels), int64 on `device`."""
        rest, top = self._channels.get(count, (None, None))
        if rest is None or top is None or rest.device.type != torch.device(device).type:
            order = self._sums().to(device).argsort(descending=True, stable=True)
            rest, top = order[count:].contiguous(), order[:count].contiguous()
            self._channels[count] = rest, top
        return rest, top

    def _sums(self, like: Tensor | None = None) -> Tensor:
        """The sums of the norms, float64 [K], the step that is being recorded included."""
        if self._norms is None:
            assert like is not None
            return torch.zeros(like.shape[1], dtype=torch.float64, device=like.device)
        norms = self._norms if like is None else self._norms.to(like.device)
        return norms if self._squares is None else norms + self._squares.to(norms.device).sqrt()

    def take_squares(self) -> Tensor | None:
        """The squares of this rank's tokens since the last `put_squares`; None if no call was recorded."""
        return self._squares if self._open else None

    def put_squares(self, squares: Tensor) -> None:
        """Replace them by those of all ranks."""
        self._squares, self._open = squares, False
        self._channels.clear()

    def state(self) -> dict[str, Tensor]:
        """The sums and the number of steps, for a checkpoint between two steps."""
        return {} if self._norms is None else {NORMS: self._sums(), STEPS: torch.tensor(self._steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `state`; no call of the coming step is recorded yet."""
        self._norms, self._squares = state.get(NORMS), None
        self._steps = int(state[STEPS]) if STEPS in state else 0
        self._position, self._open, self.latest = None, False, None
        self._channels.clear()


def join_squares(each: Iterable[OutlierNorms], summed: Callable[[Tensor], Tensor]) -> None:
    """Sum the squares of a step over the ranks, in one collective; nothing where no call was recorded.

    Args:
        each: of all layers; every rank gives the same ones in the same order, after the last backward of a step.
        summed: the sum over the ranks of a float64 vector.
    """
    recorded = [(norms, squares) for norms in each if (squares := norms.take_squares()) is not None]
    if not recorded:
        return
    joined = summed(torch.cat([squares for _, squares in recorded]))
    for (norms, squares), whole in zip(recorded, torch.split(joined, [len(s) for _, s in recorded]), strict=True):
        norms.put_squares(whole.to(squares.device))


class Parts(NamedTuple):
    """What a layer runs once its outlier channels are chosen, the other channels first."""

    number: int
    """Of outlier channels."""
    gemms: tuple[LayerGemms, LayerGemms]
    weights: tuple[PreparedWeights, PreparedWeights]

    def call(self, norms: OutlierNorms, whole: Call, *, keep: bool) -> PartsCall:
        """The calls of both parts at the position of `whole`.

        Args:
            keep: whether prepared weights are kept for the step.
        """
        weights = self.weights if keep else (PreparedWeights(), PreparedWeights())
        rest, top = (whole.of_part(gemms, own) for gemms, own in zip(self.gemms, weights, strict=True))
        norms.latest = norms.channels(self.number, self.gemms[0].device)
        return PartsCall(norms.latest, (rest, top))


class PartsCall(NamedTuple):
    """One call in two parts: of each the channels and the call."""

    channels: tuple[Tensor, Tensor]
    calls: tuple[Call, Call]


def make_parts(
    plan: LayerPlan, device: str, place: Place | None, *, sums: bool = False, keep_forms: bool = True
) -> Parts | None:
    """The parts of a layer with `plan`; None if it has no outlier channels.

    Args:
        device, place, sums: as for `LayerGemms`; the layer is not cut.
        keep_forms: whether prepared forms of the weight are kept within a step.
    """
    rest, *outliers = apart(plan).parts
    if not outliers:
        return None
    first = -(-rest.layer.in_features // _SPREAD) * _SPREAD
    return Parts(
        outliers[0].layer.in_features,
        (
            LayerGemms(rest, device, place, sums=sums, term=True),
            LayerGemms(outliers[0], device, (place or Place()).at_feature(first), sums=sums, term=True),
        ),
        (PreparedWeights(keep_forms), PreparedWeights(keep_forms)),
    )


class PartsFunction(torch.autograd.Function):
    """y [M, N] of (x [M, K], w [N, K], bias [N] or None, the call), in the dtype of the recipe.

    The products of both parts are added in float32, and the bias to their sum.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, parts: PartsCall) -> Tensor:
        gradients = gradients_of(x_MK, w_NK, bias_N, ctx.needs_input_grad)
        saved: list[Tensor | None] = [w_NK if gradients.x is not None else None]
        ctx.specs, terms, w = [], [], _values(w_NK)
        for channels, call in zip(*parts, strict=True):
            call.parameter = w_NK
            x_part, w_part = x_MK.index_select(1, channels), w.index_select(1, channels)
            y_MN, x = call.gemms.forward(x_part, w_part, None, call, gradients, None)
            terms.append(y_MN)
            if isinstance(x, Quantized):
                saved += [x.codes, x.scales, x.amax]
                ctx.specs.append((x.spec, x.shape))
            else:
                saved += [x, None, None]
                ctx.specs.append(None)
        ctx.save_for_backward(*saved)
        ctx.parts, ctx.gradients = parts, gradients
        dtype = parts.calls[0].gemms.dtype
        y_MN = terms[0] + terms[1]
        return (y_MN if bias_N is None else y_MN + bias_N.to(dtype)).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        device = ctx.parts.calls[0].gemms.device
        if torch_autocasts(device):
            with without_torchs_autocast(device):
                return (*_gradients(ctx, dy_MN), None)
        return (*_gradients(ctx, dy_MN), None)


def _gradients(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [M, K], dw [N, K], dbias [N]) from those of both parts."""
    parts: PartsCall = ctx.parts
    gradients: Gradients = ctx.gradients
    w_NK, *saved = ctx.saved_tensors
    w = None if w_NK is None else _values(w_NK)
    columns = sum(len(channels) for channels in parts.channels)
    whole: list[Tensor | None] = [None, None]
    dbias_N = None
    for number, (channels, call) in enumerate(zip(*parts, strict=True)):
        x, scales, amax = saved[3 * number : 3 * number + 3]
        if ctx.specs[number] is not None:
            spec, shape = ctx.specs[number]
            x = Quantized(spec, shape, x, scales, amax)
        wanted = gradients._replace(bias=None) if number else gradients
        w_part = None if w is None else w.index_select(1, channels)
        *found, of_bias = call.gemms.backward(dy_MN, w_part, x, call, wanted)
        dbias_N = dbias_N if number else of_bias
        for which, part in enumerate(found):
            if part is None:
                continue
            target = whole[which]
            if target is None:
                target = whole[which] = part.new_empty((part.shape[0], columns))
            target.index_copy_(1, channels, part)
    return whole[0], whole[1], dbias_N


def _values(w_NK: Tensor) -> Tensor:
    return w_NK.source.values(w_NK.dtype) if isinstance(w_NK, Gathered) else w_NK.detach()
