"""Observed calls of linear layers that `convert` did not make: torch's nn.Linear, in other people's
models.

Hooks of the module begin and end its forward pass. x, y and the weight pass through the identity,
so that dx, dy and dw are those of this call, whoever else reads x or the weight.
"""

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp4train.audits.call import ObservedCall, kept
from fp4train.audits.recorder import CallRecorder, EdgeCall
from fp4train.backends.protocol import NotShownError
from fp4train.backends.table import DTYPES, Table
from fp4train.hardware import Device
from fp4train.nn.engine import torch_autocasts
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.blocks import is_linear
from fp4train.precision.layer_plan import LayerPlan, resolve
from fp4train.precision.layers import Layer
from fp4train.precision.recipes import Custom


class ForeignObserver(CallRecorder):
    """Keeps the tensors of the first training call of a module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self._edges: EdgeCall | None = None
        self._parameter: nn.Parameter | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True),
            # the first one: those of others may change what the layer returns
            module.register_forward_hook(self._end, always_call=True, prepend=True),
        ]

    def remove(self) -> None:
        """Leave the module as it was."""
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        if self._edges is not None:
            self._edges.close()
        self._edges = None

    def _begin(self, module: nn.Module, arguments: Any, options: Any) -> Any:
        """Keep x and the weight; the call goes on with both passed through the identity."""
        if self.records or self.ended or not torch.is_grad_enabled():
            return None
        changed = None
        with self.guarding():
            if _changed_by_others(module):
                raise NotShownError("hooks of others may change its passes")
            if not arguments or type(arguments[0]) not in (Tensor, nn.Parameter):
                raise NotShownError("it is not called with a tensor of values")
            changed = self._observed(module, arguments[0])
        if changed is None:
            return None
        return (changed, *arguments[1:]), options

    def _observed(self, module: Any, x: Tensor) -> Tensor:
        """Begin the record of a call; gives x as the module is to read it."""
        w = _weight_of(module)
        bias = getattr(module, "bias", None)
        record = ObservedCall(
            name=self.name,
            plan=_plan(self.name, w, Table(dtype=_name_of(_computed_dtype(x)))),
            position=None,
            x=kept(x).reshape(-1, x.shape[-1]),
            w=kept(w),
            bias=None if bias is None or not bias.numel() else kept(bias),
        )
        self.records = [record]
        edges = self._edges = EdgeCall(self, record)
        if _cached(module.weight):
            record.unseen["wgrad"] = "torch.autocast adds up dw of all readers of a weight"
        else:
            self._parameter = module.weight
            module._parameters["weight"] = edges.passed(module.weight, "dw")
        if _cached(x):
            record.unseen["dgrad"] = "torch.autocast adds up dx of all readers of a leaf"
            return x
        return edges.passed(x, "dx")

    def _end(self, module: nn.Module, arguments: Any, result: Any) -> Any:
        """Keep y, and put the weight back."""
        if self._parameter is not None:
            module._parameters["weight"] = self._parameter
            self._parameter = None
        record = next(iter(self.records), None)
        if record is None or record.y is not None or self._edges is None:
            return None
        if not isinstance(result, Tensor):  # None where the pass raised
            self.hide("it returned no tensor")
            return None
        record.returned = not result.requires_grad  # nothing learns: no backward pass comes
        return self._edges.returned(result)


def _weight_of(module: nn.Module) -> Tensor:
    """The weight of torch's nn.Linear."""
    if "weight" not in module._parameters:
        raise NotShownError("its weight is made of others")
    weight: Any = module.weight
    if type(weight) not in (Tensor, nn.Parameter):
        raise NotShownError(f"its weight is of the kind {type(weight).__name__}")
    return cast(Tensor, weight)


def _changed_by_others(module: nn.Module) -> bool:
    """Whether other code has put a function in the place of the forward pass, or sees gradients.

    torch has no public way to ask for hooks: its own dictionaries are read.
    """
    return bool(
        "forward" in vars(module)
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _cached(tensor: Tensor) -> bool:
    """Whether torch.autocast rounds a leaf once for all its readers: another tensor in its place
    would be rounded anew, and its gradients added up otherwise.
    """
    autocasts = torch_autocasts(tensor.device.type) and torch.is_autocast_cache_enabled()
    return autocasts and tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32


def _computed_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which torch multiplies x."""
    if torch_autocasts(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _name_of(dtype: torch.dtype) -> str:
    for name, named_dtype in DTYPES.items():
        if named_dtype is dtype:
            return name
    raise NotShownError(f"it computes in {dtype}")


def _plan(name: str, w: Tensor, table: Table) -> LayerPlan:
    """The plan of a layer that runs `table`, whoever runs it."""
    out_features, in_features = w.shape
    layer = Layer(name=name, in_features=in_features, out_features=out_features, block=0, blocks=1)
    recipe = Custom(
        label=table.name, fprop=table.fprop, dgrad=table.dgrad, wgrad=table.wgrad, dtype=table.dtype
    )
    backend = "reference" if table.quantised else "auto"
    return resolve(layer, recipe, None, backend, Device(type="cpu"))


def foreign_observers(
    model: nn.Module, layers: Collection[str]
) -> tuple[dict[str, ForeignObserver], dict[str, str]]:
    """(Observers of the linear layers of a model that `convert` did not make, layer → why another
    one is not audited).

    Args:
        layers: names of those that are to be audited.
    """
    observers: dict[str, ForeignObserver] = {}
    uncovered: dict[str, str] = {}
    for name, module in linears(model).items():
        if name not in layers:
            continue
        if type(module) is nn.Linear:
            observers[name] = ForeignObserver(name, module)
        else:
            uncovered[name] = f"the audit does not know what a {type(module).__name__} computes"
    return observers, uncovered


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model that `convert` did not make, by their first name."""
    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, PlannedLayer)
        and (is_linear(module) or _is_of_transformer_engine(module))
    }


def _is_of_transformer_engine(module: nn.Module) -> bool:
    package = type(module).__module__.partition(".")[0]
    return package == "transformer_engine" and hasattr(module, "in_features")
