"""Executors: what the plan of a layer becomes, made where a plan is applied, or by the first call in an `autocast`.

    whole_layer   torch in high precision; a backend's kernels of a whole layer (Transformer Engine)
    gemms         three GEMMs, each on its own backend
    cut           the same of a layer's shard, with tensor parallelism's collectives
    parts         the same of parts of the in features, each in a recipe of its own
    groups        the same of a group of weights, each for its own rows (experts)

`make_executor` alone decides between them. What an executor carries from step to step are states of its layer, because
it outlives a change of the recipe: the histories of delayed scaling, the norms of the channels, a backend's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from torch import Tensor

from fp4train.backends import LAYER_BACKENDS, LayerState
from fp4train.nn.call import Executor
from fp4train.nn.executors.cut import CutGemms, LayerShard
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.groups import GroupGemms
from fp4train.nn.executors.parts import ChannelNorms, ChannelParts
from fp4train.nn.executors.whole_layer import BackendExperts, BackendLayer, TorchLayer
from fp4train.nn.scaling import DataRanks, DelayedScaling
from fp4train.precision.plan import LayerPlan

if TYPE_CHECKING:
    from fp4train.nn.planned import PlannedLayer


_STATES: Final[Mapping[str, type[DelayedScaling | ChannelNorms]]] = {
    each.name: each for each in (DelayedScaling, ChannelNorms)
}

STATE_TENSORS: Final = DelayedScaling.tensors | {f"{ChannelNorms.name}.{k}": v for k, v in ChannelNorms.tensors.items()}
"""Name of a saved tensor, or what it begins with → (dtype, dimensions, whether it must be finite)."""


def _kind(plan: LayerPlan) -> type[Executor]:
    """The executor of a layer that is not cut."""
    if plan.layer.experts:
        return GroupGemms if plan.layer_backend is None else BackendExperts
    if not plan.quantised:
        return TorchLayer
    if plan.layer_backend is not None:
        return BackendLayer
    return ChannelParts if plan.recipe.splits else Gemms


def make_executor(plan: LayerPlan, device: str, shard: LayerShard | None = None, *, sums: bool = False) -> Executor:
    """The executor of `plan`; arguments as for `Executor`."""
    if shard is not None and shard.tensor is not None and not plan.layer.experts:
        return CutGemms(plan, device, shard, sums=sums)
    kind = _kind(plan)
    if device == "meta":  # for meta tensors the shape is enough
        kind = GroupGemms if plan.layer.experts else TorchLayer
    return kind(plan, device, shard, sums=sums)


def why_no_graph(plan: LayerPlan) -> str | None:
    """Why a step with a layer of `plan` depends on the host, so that no CUDA graph can record it; None: it can."""
    return (GroupGemms if plan.layer.experts else _kind(plan)).why_no_graph(plan)


def make_state(layer: PlannedLayer, name: str) -> LayerState:
    """A state of `layer` that has seen nothing, by name."""
    if name in LAYER_BACKENDS:
        backend = LAYER_BACKENDS[name]
        return (backend.expert_kernels if layer.layer.experts else backend.kernels)(layer.layer.name)
    made = _STATES[name]()
    made.joined = layer.joined
    return made


def saved_states(states: Mapping[str, LayerState]) -> dict[str, Tensor]:
    """The tensors of a layer's states, for a checkpoint: those of delayed scaling by their own names, those of others
    behind the name of their state."""
    return {
        key if name == DelayedScaling.name else f"{name}.{key}": tensor
        for name, each in states.items()
        for key, tensor in each.state().items()
    }


def by_state(saved: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The result of `saved_states`, by the name of the state."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in saved.items():
        name, _, rest = key.partition(".")
        if name in DelayedScaling.tensors:
            name, rest = DelayedScaling.name, key
        found.setdefault(name, {})[rest] = tensor
    return found


def join_states(layers: Iterable[PlannedLayer], ranks: DataRanks) -> None:
    """Join the layers' states over `ranks` after the last backward of a step: they become those of the whole batch."""
    layers = list(layers)
    for name, kind in _STATES.items():
        kind.join([layer.states[name] for layer in layers if name in layer.states], ranks)  # type: ignore[misc]
