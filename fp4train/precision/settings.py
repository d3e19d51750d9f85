"""The settings of one region of `autocast`, and what compiled graphs take as inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fp4train.precision.policy import LayerPolicy
from fp4train.precision.recipe import Recipe
from fp4train.quantize import RunStep


class GraphInput(type):
    """Metaclass of objects that compiled graphs take as inputs.

    torch.compile accepts such objects only if their class has a private metaclass of torch.
    `compile_context` replaces this metaclass with torch's when a graph is traced. A process that
    compiles nothing uses no private part of torch.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Context(metaclass=GraphInput):
    """The settings of one `autocast` region, which documents the fields."""

    recipe: Recipe
    policy: LayerPolicy | None = None
    seed: int = 0
    step: int | None = None
    token_offset: int | None = None
    token_start: int = 0
    """Index of this rank's first token in a step, where layers count their tokens."""
    counters: torch.Tensor | None = field(default=None, repr=False)
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    """Cache for layers that read the same input in one forward pass, and in it one for each expert;
    `forget` clears them.
    """
    compiled_calls: dict[object, list[Any]] = field(default_factory=dict, repr=False)
    """Calls made from compiled graphs, by layer, for graphs that recompute activations."""
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

    run_step: RunStep | None = field(init=False, repr=False)
    """The step of the run; None: there is none."""

    def __post_init__(self) -> None:
        if self.step is None:
            step = None
        else:
            step = RunStep(self.seed, self.step)
        object.__setattr__(self, "run_step", step)

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
