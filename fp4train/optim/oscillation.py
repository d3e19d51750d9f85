"""OsciReset of TetraJet-v2 (arXiv:2510.27527): weights that jump between two quantised values are
put on one of them.

Late in training a weight moves little, but near a threshold of its grid its quantised value still
jumps by a whole step. For each weight w with quantised value Q(w), over the watched steps t,

    ratio = Σ |Q(w_t) − Q(w_{t−1})| / Σ |w_t − w_{t−1}|

is about 1 where the value follows the weight, and large where it oscillates. At the end of the
watch every weight with ratio ≥ `ratio` becomes Q(w), the middle of its bin, from where it takes
many steps to reach a threshold again.

What is watched is kept by parameter, float32 of the weight's shape, and is part of every
checkpoint:

    seen    the weight after the step before
    moved   Σ |w_t − w_{t−1}|
    jumped  Σ |Q(w_t) − Q(w_{t−1})|
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp4train.quantize import QuantSpec, quantizer
from fp4train.shards import local
from fp4train.text import check_least

SEEN = "seen"
MOVED = "moved"
JUMPED = "jumped"

Watched = tuple[str, nn.Parameter, Callable[[Tensor], Tensor]]
"""A weight's name, the weight, and what gives Q(w) of it (`values_of`)."""

Paths = dict[str, dict[str, Tensor]]
"""Name of a weight → what is kept of it between the steps of a watch: `SEEN`, `MOVED`, `JUMPED`."""


@dataclass(frozen=True, kw_only=True)
class OscillationReset:
    """The times at which weights are watched and reset; the defaults of all but `every` are those
    of the authors' runs.

    Args:
        every: number of optimizer steps from one watch to the next; 0: never.
        watch: number of optimizer steps of a watch; weights are reset after the last one.
        ratio: smallest ratio of the paths of value and weight with which a weight oscillates.
        start: number of optimizer steps before the first watch; the authors begin at about 60 % of
            a run.
    """

    every: int = 0
    watch: int = 50
    ratio: float = 8.0
    start: int = 0

    def __post_init__(self) -> None:
        check_least(
            self, "oscillation.", "every", least=0, must="a number of steps, or 0 for never"
        )
        check_least(self, "oscillation.", "watch")
        if self.every and self.watch >= self.every:
            raise ValueError(
                f"oscillation.watch={self.watch} must be below oscillation.every={self.every}"
            )
        if not self.ratio > 1:
            raise ValueError(
                f"oscillation.ratio={self.ratio} must be > 1: a value that follows its weight has 1"
            )
        check_least(self, "oscillation.", "start", least=0, must="≥ 0")


def why_not(spec: QuantSpec) -> str | None:
    """Why the values of a weight have no fixed thresholds at which it could oscillate; None if they
    have.
    """
    if spec.random:
        return f"rounding={spec.rounding!r} draws its thresholds"
    if spec.earlier_amax:
        return "the steps before move its thresholds (delayed scaling, or a held amax)"
    if spec.hadamard is not None or spec.requantises is not None:
        return "it is transformed or rounded twice"
    return None


def values_of(weight: Tensor, spec: QuantSpec) -> Tensor:
    """Q(w) as the forward pass multiplies it, float32 [N, K]."""
    decoded = quantizer(spec, weight.device.type).values(weight)
    values = decoded.values.float()
    if decoded.scale is None:
        return values
    return values * decoded.scale


@torch.no_grad()
def follow(
    settings: OscillationReset,
    paths: Paths,
    watched: Iterable[Watched],
    done: int,
    failed: Tensor,
) -> float | None:
    """Begin a watch after an optimizer step, go on with it, or end it; nothing where none is due.

    The device decides all but the end, for which the host waits.

    Args:
        paths: paths of the weights; changed here, and empty between two watches.
        watched: the weights that the optimizer has stepped, whole on each rank.
        done: optimizer steps done, this one included.
        failed: bool [], the step changed no weight since its gradients are not finite.

    Returns:
        The share of the watched weights that were reset; None where no watch ended.
    """
    if not settings.every:
        return None
    since = done % settings.every
    if since > settings.watch or done - since < max(settings.start, 1):
        return None
    ending = since == settings.watch
    if ending and bool(failed):
        return None
    count = torch.zeros((), device=failed.device)
    total = 0
    for name, weight, quantised in watched:
        now = local(weight.detach())
        if since == 0:
            zeros = torch.zeros_like(now)
            paths[name] = {SEEN: now.clone(), MOVED: zeros, JUMPED: zeros.clone()}
            continue
        if name not in paths:  # the watch began in another recipe
            continue
        state = paths[name]
        value = quantised(now)
        state[MOVED] += (now - state[SEEN]).abs_()
        state[JUMPED] += (value - quantised(state[SEEN])).abs_()
        state[SEEN].copy_(now)
        if ending:
            # 0 ≥ 0 is no oscillation: a weight that did not move, though its block's scale may have
            reset = (state[JUMPED] >= settings.ratio * state[MOVED]) & (state[MOVED] > 0)
            now.copy_(torch.where(reset, value, now))
            count = count + reset.sum()
            total = total + reset.numel()
    if not ending:
        return None
    paths.clear()
    return float(count) / total if total else None
