"""The weights of a run that oscillate between two quantised values: which are watched, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from fp4train.config import Config
from fp4train.errors import UserError
from fp4train.optim.oscillation import Watched, follow, why_not
from fp4train.parallel.world import World
from fp4train.precision.plan import Plan
from fp4train.run.run import Run


def check_oscillation(config: Config, plan: Plan, world: World) -> None:
    """Raises UserError where `oscillation.every` asks for what cannot be done, or would do nothing."""
    settings = config.oscillation
    if not settings.every:
        return
    if world.shards * world.tensors * world.stages > 1:
        raise UserError(
            f"oscillation.every={settings.every}: weights are watched whole, and this run cuts them over ranks; "
            "use parallel.dp_shard=1 with dp_replicate, or leave it out"
        )
    specs = [part.fprop.operands.second for each in plan.stretches for part in each.layers.values()]
    reasons = {why_not(spec) for spec in specs if spec is not None}
    if reasons and None not in reasons:  # a run in high precision may have it: it is one of a sweep
        why = "; ".join(sorted(filter(None, reasons)))
        raise UserError(f"oscillation.every={settings.every} would reset nothing: {why}; leave it out")


def reset_oscillating(run: Run, failed: Tensor) -> dict[str, float | str]:
    """Watch the weights after an optimizer step, and reset those that oscillate where that is due; what is logged."""
    if not run.config.oscillation.every:
        return {}
    share = follow(run.config.oscillation, run.optimizer, watched(run), run.step + 1, failed)
    return {} if share is None else {"train/oscillating": share}


def watched(run: Run) -> Iterator[Watched]:
    """The weights that the current stretch quantises for fprop with fixed thresholds."""
    layers = run.plan.at(run.step).layers
    for module in run.linears():
        spec = layers[module.layer.name].fprop.operands.second
        if spec is not None and why_not(spec) is None and isinstance(module.weight, nn.Parameter):
            yield module.weight, spec
