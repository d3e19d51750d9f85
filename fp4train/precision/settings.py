"""The settings of one region of `autocast`, and what compiled graphs take as inputs."""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.quantize import Position, RunStep

Counts: TypeAlias = Literal["calls", "tokens", "nothing"]
"""What layers count in a context: their calls, each a step of its own, where the step is not known;
the tokens of their calls within a step, where the first one's index is not; or nothing.
"""
START_WITHOUT_SEED = Position(RunStep(0, 0))
"""The place of the first token of a run without a seed."""


class GraphInput(type):
    """Metaclass of objects that compiled graphs take as inputs.

    torch.compile accepts such objects only if their class has a private metaclass of torch.
    `compile_context` replaces this metaclass with torch's when a graph is traced. A process that
    compiles nothing uses no private part of torch.
    """


class ConstantWeights(dict[object, Any]):
    """Layer and its weight → what was made of it, shared by the passes between which nobody writes
    weights: those of a step's microbatches, of an evaluation, of a text that is generated.

    This is the one rule of codes and weights: what is made of a weight serves the call that made
    it, forward and backward. Other calls get it only in contexts that hold the same object of this
    class, and a loop makes a new one for the passes after a write. Nothing else is a sign that a
    weight is as it was: neither the step, which keys random bits, nor torch's version counter,
    which `.data`, fused optimizers and the gathers of FSDP2 do not raise.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Context(metaclass=GraphInput):
    """The settings of one `autocast` region, which documents the fields."""

    recipe: Recipe
    policy: LayerPolicy | None = None
    position: Position = START_WITHOUT_SEED
    """The place of the calls' tokens in the run; of what layers count it says where that begins."""
    counts: Counts = "calls"
    """What layers count by themselves."""
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    """Cache for layers that read the same input in one forward pass, and in it one for each expert;
    `forget` clears them.
    """
    compiled_calls: dict[object, list[Any]] = field(default_factory=dict, repr=False)
    """Calls made from compiled graphs, by layer, for graphs that recompute activations."""
    constant: ConstantWeights | None = field(default=None, repr=False)
    """What calls share of weights; None: nothing, as weights may change between any two."""
    called_layers: dict[object, bool] | None = field(default=None, repr=False)
    """Layer that was called → whether it quantises; None: the layers are not watched."""
    applied: bool = False
    """Whether the layers run a plan that was applied to them: another recipe or policy than the
    plan's is an error.
    """
    auxiliary: float = 0.0
    """The factor, in a pass of training, of losses that parts of the model have of their own,
    before their gradient is taken: the microbatch's share of the batch, times the loss scale. 0:
    they have none.
    """

    def activation_dtype(self) -> torch.dtype:
        """The dtype in which a model carries its activations."""
        return self.recipe.torch_dtype

    def forget(self) -> None:
        """Clear what layers share. Calls hold the experts' caches until the backward pass, and a
        cache holds tensors of later layers: one that is not cleared keeps the graph of the whole
        pass, which no garbage collector sees.
        """
        for shared_forms in self.shared.values():
            if isinstance(shared_forms, dict):
                shared_forms.clear()
        self.shared.clear()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """The compiler's cache key, equal for all contexts: graphs depend on the dtype only."""
        return str, (Context.__qualname__,)
