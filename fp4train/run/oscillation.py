"""The weights of a run that oscillate between two quantised values: which are watched, and when that is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from fp4train.config import Config
from fp4train.errors import UserError
from fp4train.optim.oscillation import Watched, follow, why_not
from fp4train.precision.plan import Plan
from fp4train.run.run import Run


def check_oscillation(config: Config, plan: Plan) -> None:
    """Raises UserError where `oscillation.every` would do nothing."""
    settings = config.oscillation
    if not settings.every:
        return
    specs = [part.fprop.operands.second for each in plan.stretches for part in each.layers.values()]
    reasons = {why_not(spec) for spec in specs if spec is not None}
    if reasons and None not in reasons:  # a run in high precision may have it: it is one of a sweep
        why = "; ".join(sorted(filter(None, reasons)))
        raise UserError(f"oscillation.every={settings.every} would reset nothing: {why}; leave it out")


def reset_oscillating(run: Run, trained: Iterable[str]) -> dict[str, float | str]:
    """Watch the weights after an optimizer step, and reset those that oscillate where that is due; what is logged.

    Args:
        trained: the parameters that had gradients. The others have no state of the optimizer yet, and AdamW makes its
            moments only where a parameter's state is empty.
    """
    if run.failed is None or not run.config.oscillation.every:
        return {}
    share = follow(run.config.oscillation, run.optimizer, watched(run, trained), run.step + 1, run.failed)
    return {} if share is None else {"train/oscillating": share}


def watched(run: Run, trained: Iterable[str]) -> Iterator[Watched]:
    """The weights among `trained` that the current stretch quantises for fprop with fixed thresholds; of layers that
    multiply some channels in another recipe the others. Weights stored as [in_features, out_features] (`Conv1D`) are
    left alone."""
    layers, parameters = run.plan.at(run.step).layers, dict(run.model.named_parameters())
    stepped = {id(parameters[name]) for name in trained}
    for module in run.linears():
        spec = layers[module.layer.name].fprop.operands.second
        if spec is not None and why_not(spec) is None and id(module.weight) in stepped and not module.transposed:
            assert isinstance(module.weight, nn.Parameter)
            yield module.weight, spec, module.channels
