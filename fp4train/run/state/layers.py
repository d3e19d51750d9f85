"""What layers carry from step to step: amax histories of delayed scaling, norms of channels, ….

What they are `nn.executors.saved_tensor` lists; a layer has what its executors need.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp4train.nn.executors import saved_tensor
from fp4train.run.state.base import RunState


class LayerStates(RunState):
    """The states of all planned layers, by the layer's name."""

    key = "scaling"

    def saved(self) -> Mapping[str, Any]:
        """See `RunState.saved`; empty tables where a layer carries nothing."""
        return self.run.scaling()

    def check(self, saved: Any) -> None:
        """See `RunState.check`."""
        if not isinstance(saved, dict):
            raise ValueError("it holds no scales")
        names = {layer.layer.name for layer in self.run.planned_layers}
        for layer, entries in saved.items():
            if layer not in names or not isinstance(entries, dict):
                raise ValueError(f"it has scales of a layer {layer}")
            for name, tensor in entries.items():
                _check_entry(f"{name} of {layer}", name, tensor)

    def load(self, saved: Any) -> None:
        """See `RunState.load`."""
        self.run.load_scaling(saved)


def _check_entry(what: str, name: str, tensor: Any) -> None:
    """Raises ValueError where `tensor` is none, or not as entries of this name are."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{what} is no tensor")
    if (described := saved_tensor(name)) is None:
        return
    dtype, dimensions, finite = described
    if tensor.dtype != dtype or tensor.dim() != dimensions:
        raise ValueError(f"{what} is {tensor.dtype} of shape {list(tensor.shape)}")
    if finite and not tensor.isfinite().all():
        raise ValueError(f"{what} is not finite")
