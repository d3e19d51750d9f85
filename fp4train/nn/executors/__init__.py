"""Executors: what the plan of a layer becomes, made where a plan is applied, or by the first call
in an `autocast`.

    whole_layer   torch in high precision; a backend's kernels of a whole layer (Transformer Engine)
    gemms         three GEMMs, each on its own backend
    cut           the same of a layer's shard, with tensor parallelism's collectives
    parts         the same of parts of the in features, each in a recipe of its own
    terms         the same of operands that are sums: a mean and the rest, codes and their residual;
                  joined: these terms as one product
    groups        the same of a group of weights, each for its own rows (experts)

`EXECUTORS` alone decides between them. What an executor carries from step to step are states of its
layer, because it outlives a change of the recipe: the histories of delayed scaling, the norms of
the channels, a backend's own. Each kind of state says how it is saved, checked and joined over the
ranks (`LayerState`), each executor which kinds it needs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from fp4train.backends import LAYER_BACKENDS, DataRanks, LayerState, SavedTensor
from fp4train.nn.engine import Executor, GradientSum
from fp4train.nn.executors.cut import CutGemms, gathered, whole_blocks
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.executors.groups import BackendExperts, GroupGemms
from fp4train.nn.executors.joined import Term
from fp4train.nn.executors.parts import ChannelNorms, ChannelParts
from fp4train.nn.executors.terms import Outer, TermGemms, without_mean
from fp4train.nn.executors.whole_layer import BackendLayer, TorchLayer
from fp4train.nn.layer_shard import LayerShard
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import Layer

EXECUTORS: Mapping[type[Executor], Callable[[LayerPlan], object]] = {
    BackendExperts: lambda plan: plan.layer.experts and plan.layer_backend,
    GroupGemms: lambda plan: plan.layer.experts,
    CutGemms: lambda plan: plan.layer.cut,
    TorchLayer: lambda plan: not plan.quantised,
    BackendLayer: lambda plan: plan.layer_backend,
    ChannelParts: lambda plan: plan.recipe.outliers,
    TermGemms: lambda plan: plan.recipe.centred or plan.recipe.residual,
    Gemms: lambda plan: True,
}
"""Executor → whether it can run a layer with this plan. The first one that can does."""

STATES: Mapping[str, type[LayerState]] = {
    kind.kind: kind for executor in EXECUTORS for kind in executor.kinds
}
"""The kinds of states that are not a backend's, in the order in which they are joined."""


def executor_class(plan: LayerPlan) -> type[Executor]:
    """The class of the executor of `plan`."""
    return next(candidate for candidate, runs in EXECUTORS.items() if runs(plan))


def make_executor(
    plan: LayerPlan, device: str, shard: LayerShard | None = None, *, sums: GradientSum = None
) -> Executor:
    """The executor of `plan`; arguments as for `Executor`."""
    chosen = executor_class(plan)
    if device == "meta" and chosen is not CutGemms:  # for meta tensors the shape is enough
        chosen = GroupGemms if plan.layer.experts else TorchLayer
    if chosen is GroupGemms:
        plan_of_member = replace(plan, layer=replace(plan.layer, experts=0, cut=None))
        member = TorchLayer if device == "meta" else executor_class(plan_of_member)
        return GroupGemms(member, plan, device, shard, sums=sums)
    return chosen(plan, device, shard, sums=sums)


class StatefulLayer(Protocol):
    """A layer whose states are made here (`nn.planned.PlannedLayer`).

    Attributes:
        layer: name, sizes and place in the model.
        states: tensors that executors carry from step to step, by name.
        joined: whether the loop joins the states over the ranks.
        common: data that the states of all layers of a model have in common.
    """

    layer: Layer
    states: dict[str, LayerState]
    joined: bool
    common: dict[Any, Any]


def make_state(layer: StatefulLayer, kind: str) -> LayerState:
    """A state of `layer` that has seen nothing."""
    if kind in LAYER_BACKENDS:
        backend = LAYER_BACKENDS[kind]
        return (backend.expert_kernels if layer.layer.experts else backend.kernels)(
            layer.layer.name
        )
    state = STATES[kind]()
    state.joined = layer.joined
    state.common = layer.common
    return state


def saved_states(states: Mapping[str, LayerState]) -> dict[str, Tensor]:
    """The tensors of a layer's states, by their names in a checkpoint."""
    return {
        f"{state.kind}.{key}" if state.prefixed else key: tensor
        for state in states.values()
        for key, tensor in state.state().items()
    }


def by_state(saved: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The result of `saved_states`, by the kind of the state."""
    tensors_by_kind: dict[str, dict[str, Tensor]] = {}
    for key, tensor in saved.items():
        kind, name = _place(key)
        tensors_by_kind.setdefault(kind, {})[name] = tensor
    return tensors_by_kind


def saved_tensor(key: str) -> SavedTensor | None:
    """The dtype, … that its state demands of the tensor of this name in a checkpoint; None: it
    demands nothing.
    """
    kind, name = _place(key)
    if kind in STATES:
        return STATES[kind].tensors.get(name.partition(".")[0])
    return None


def _place(key: str) -> tuple[str, str]:
    """The kind of the state whose tensor has this name in a checkpoint, and its name within the
    state.
    """
    head, _, tail = key.partition(".")
    owner = next(
        (name for name, state in STATES.items() if not state.prefixed and head in state.tensors),
        None,
    )
    return (head, tail) if owner is None else (owner, key)


def join_states(layers: Iterable[StatefulLayer], ranks: DataRanks) -> None:
    """Join the layers' states over `ranks` after the last backward of a step: they become those of
    the whole batch.
    """
    states_by_kind: dict[str, list[LayerState]] = {kind: [] for kind in STATES}
    for kind, state in (item for layer in layers for item in layer.states.items()):
        states_by_kind.setdefault(kind, []).append(state)
    for states in filter(None, states_by_kind.values()):
        states[0].join(states, ranks)
