"""Experts of transformers' mixtures as planned layers: Mixtral, Qwen3-MoE, gpt-oss and what else
uses its interface.

transformers (5 and later) keeps the experts of a block as 3-D parameters of one module,
`gate_up_proj` (`up_proj` where there is no gate) and `down_proj`, [E, out, in] or transposed, with
biases or without. Its decorator `use_experts_implementation` looks up the function that multiplies
them in `ALL_EXPERTS_FUNCTIONS`, by the name that the module's configuration has, and notes on the
module how they are laid out (https://huggingface.co/docs/transformers/experts_interface). `convert`
enters a function of that kind here, and adds a planned layer per parameter to the module:
`experts.gate_up`, `experts.down`.

The planned layers have no parameters of their own: they read those of the module. So parameters,
names, state dict and saved folders stay as they were. The activation is the module's own.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp4train.nn.call import Counts
from fp4train.nn.experts import Experts, by_expert
from fp4train.precision.layers import Layer

IMPLEMENTATION = "fp4train"
"""The name of our function among transformers' implementations of experts."""

_KEYS = ("gate_up_proj", "up_proj", "down_proj")


class HeldExperts(Experts):
    """Experts whose weights and biases are parameters of the module that holds this layer.

    Args:
        owner: that module.
        key: name of the parameter there, [E, out, in], or [E, in, out] if the owner
            `is_transposed`; its biases, if the owner has some, are those of f"{key}_bias".
    """

    _owner: Any

    def __init__(self, owner: Any, key: str) -> None:
        nn.Module.__init__(self)
        self._key, self.transposed = key, bool(owner.is_transposed)
        self.read_from(owner)
        experts, out_features, in_features = (
            self.weight.mT if self.transposed else self.weight
        ).shape
        alone = Layer(
            name=key, in_features=in_features, out_features=out_features, block=0, blocks=1
        )
        per_token = getattr(owner.config, "num_experts_per_tok", None) or 1
        self._begin(replace(alone, experts=experts, per_token=per_token), "auto")

    def read_from(self, owner: nn.Module) -> None:
        """Take weights and biases of `owner`: the holder, or the replica of it that a device
        has.
        """
        self.__dict__["_owner"] = owner  # no submodule: the owner holds this layer

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        weight_ENK: Tensor = getattr(self._owner, self._key)
        return weight_ENK

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return getattr(self._owner, f"{self._key}_bias") if self._owner.has_bias else None


def hold_experts(model: nn.Module) -> None:
    """Let planned layers multiply the experts of transformers in `model` that do not have them
    yet.
    """
    for owner in list(_owners(model)):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
        for key in _keys(owner):
            owner.add_module(key.removesuffix("_proj"), HeldExperts(owner, key))
        # A configuration of its own: models that are not converted may share the one that it was
        # made with.
        owner.config = copy.copy(owner.config)
        owner.config._experts_implementation_internal = IMPLEMENTATION  # type: ignore[union-attr]


def _owners(model: nn.Module) -> Iterator[nn.Module]:
    """Modules of the interface, known by what its decorator notes on them, and of a forward that
    asks it.
    """
    for module in model.modules():
        calls = _asks(module) and "forward" not in vars(module)
        if (
            _notes_layout(module)
            and calls
            and not _is_cut(module)
            and not any(map(_is_held, module.children()))
        ):
            yield module


def why_outside(module: nn.Module) -> str | None:
    """The reason why experts of transformers that use its interface have no planned layers; None:
    it is another one.
    """
    if not _asks(module) or not type(module).__module__.startswith("transformers."):
        return None
    if _is_cut(module):
        return "3-D expert parameters, cut by transformers' expert parallelism"
    if not _notes_layout(module):
        return (
            "3-D expert parameters whose layout this release of transformers does not note: "
            "newer ones of 5 do"
        )
    return None


def _notes_layout(module: nn.Module) -> bool:
    return {"config", "has_gate", "has_bias", "is_transposed", "is_concatenated"} <= vars(
        module
    ).keys()


def _asks(module: nn.Module) -> bool:
    """Whether its class looks up what multiplies the experts."""
    return hasattr(type(module).forward, "__wrapped__")


def _is_cut(module: nn.Module) -> bool:
    return bool(getattr(module, "_is_expert_parallel", False))  # not every release has it


def _keys(owner: nn.Module) -> list[str]:
    return [
        key
        for key in _KEYS
        if isinstance(value := getattr(owner, key, None), Tensor) and value.dim() == 3
    ]


def _is_held(module: nn.Module) -> bool:
    return isinstance(module, HeldExperts)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Σ of each token's experts, weighted, in transformers' interface.

    Args:
        hidden_states: [tokens, width].
        top_k_index, top_k_weights: [tokens, top], each token's experts and their weights.
    """
    if torch.compiler.is_dynamo_compiling():
        # the host reads the counts: no graph has the experts
        from fp4train.precision.compile_context import call

        compiled: Tensor = call(_routed, self, hidden_states, top_k_index, top_k_weights)
        return compiled
    return _routed(self, hidden_states, top_k_index, top_k_weights)


def _routed(owner: Any, x_MD: Tensor, chosen_MK: Tensor, weights_MK: Tensor) -> Tensor:
    first_layer, last = (child for child in owner.children() if isinstance(child, HeldExperts))

    def mlp(rows: Tensor, counts: Counts | Tensor) -> Tensor:
        for layer in (first_layer, last):
            layer.read_from(owner)
        hidden = first_layer(rows, counts)
        if owner.has_gate:
            hidden = owner._apply_gate(hidden)
        else:
            hidden = owner.act_fn(hidden)
        y: Tensor = last(hidden, counts)
        return owner.post_expert_norm(y) if getattr(owner, "has_post_expert_norm", False) else y

    return by_expert(x_MD, weights_MK, chosen_MK.flatten(), first_layer.experts, mlp).to(x_MD.dtype)
