"""The states of a run: a new one is a class in `run/state/` and a line in `STATES`.

Saving, restoring, resharding, the stages of a pipeline, checks and the plan's memory go over this
list.
"""

from collections.abc import Mapping

from torch import nn

from fp4train.config import Config
from fp4train.run.state.base import RunState, Trained
from fp4train.run.state.layers import LayerStates
from fp4train.run.state.moments import Moments
from fp4train.run.state.numbers import DataPlace, LossHistory, LossScaleState
from fp4train.run.state.oscillation import Oscillation
from fp4train.run.state.weights import ExponentialAverage, ModelWeights, OtherWeights

STATES: tuple[type[RunState], ...] = (
    ModelWeights,
    Moments,
    LayerStates,
    Oscillation,
    ExponentialAverage,
    LossScaleState,
    LossHistory,
    DataPlace,
)
"""All states, in the order in which they are checked, restored, and follow a step."""
WEIGHT_KINDS: Mapping[str, type[OtherWeights]] = {
    state.key: state for state in STATES if issubclass(state, OtherWeights)
}
"""Kinds of weights that a run may keep beside the trained ones, RUN:KIND, and their states."""


def states_of(run: Trained) -> list[RunState]:
    """The states of a run whose model lies on its ranks."""
    states = (state(run) for state in STATES if state.used(run.config))
    return [state for state in states if state.kept]


def bytes_per_parameter(config: Config, model: nn.Module) -> dict[str, float]:
    """Title of a state → its bytes per parameter of the model, where it has any."""
    sizes = {s.title: s.bytes_per_parameter(config, model) for s in STATES if s.used(config)}
    return {title: size for title, size in sizes.items() if size}


def how_to_have(kind: str, config: Config | None = None) -> str:
    """The end of an error about weights that a run does not keep: the option that keeps them.

    Args:
        kind: kind of the weights (`WeightSource`).
        config: configuration of the run; None: it is not known.

    Returns:
        "; a run with train.ema=0.999 keeps ema"; empty where no option does, or the run has it.
    """
    state = WEIGHT_KINDS.get(kind)
    if state is None or (config and state.used(config)):
        return ""
    return f"; a run with {state.option} keeps {kind}"
