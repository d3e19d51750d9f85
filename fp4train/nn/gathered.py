"""Weights that are gathered for the time of a layer's call only (FSDP), and have no memory of their
own between calls.

`Gathered` stands for the weight: it has the weight's shape and gradient, and a source that gives
what GEMMs need of what was sent. Any other operation on it gathers the float32 master from the
shards: every rank must then do the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.weight_form import WeightForm
from fp4train.quantize import Own

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class GatheredSource(Protocol):
    """The origin of a gathered weight. What it gives is valid until the weight is freed after the
    layer's call.

    rounds: whether ranks send each other BF16 values that stand for the float32 master.
    members: weights of the group that it is; 0: it is one weight.
    """

    rounds: bool
    members: int

    def prepared(self, form: WeightForm, call: LayerCall) -> Prepared | None:
        """The weight in a form, from codes; None if the weight did not come as codes: `values` has
        it then.
        """

    def rounded(self, codes: Own, call: LayerCall) -> Tensor | None:
        """The values of these codes of the whole weight [N, K], in BF16; None if they did not
        come.
        """

    def fused_amax(self, call: LayerCall) -> Tensor | None:
        """The largest amax of the float32 masters of the weights that share a scale; None if it was
        not joined.
        """

    def values(self, dtype: torch.dtype) -> Tensor:
        """The whole weight [N, K]: as it came if that is `dtype`, else cast from the float32
        master.
        """

    def member(self, index: int) -> GatheredSource:
        """The origin of the weight at this place of a group of weights [E, N, K]."""

    def master(self) -> Tensor:
        """The whole float32 weight [N, K] in memory of its own, of rounded values if ranks send
        each other only those: a collective if it did not come so.
        """


class Gathered(Tensor):
    """A weight [N, K], or a group of them [E, N, K], without memory of its own."""

    source: GatheredSource

    def held(self) -> Tensor:
        """The weight as it came, in BF16 or float32: memory that is freed after the call and filled
        for backward.
        """
        return self.source.values(torch.bfloat16 if self.source.rounds else torch.float32)

    @staticmethod
    def __new__(cls, source: GatheredSource, shape: torch.Size, device: torch.device) -> Gathered:
        gathered: Gathered = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=device
        )
        gathered.source = source
        return gathered

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Gathered({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if args and isinstance(args[0], Gathered):
            weight = args[0]
        else:
            weight = None
        if (
            weight is not None
            and func is torch.ops.aten._to_copy.default
            and set(kwargs or {}) == {"dtype"}
        ):
            return weight.source.values(kwargs["dtype"]).clone()
        if (
            weight is not None
            and func is torch.ops.aten.select.int
            and args[1] == 0
            and weight.source.members
        ):
            return Gathered(
                weight.source.member(args[2]), torch.Size(weight.shape[1:]), weight.device
            )
        if weight is not None and (func in _SAME or _is_whole_view(func, args, weight)):
            return Gathered(weight.source, weight.shape, weight.device)
        return func(
            *_with_masters(args), **{name: _master(value) for name, value in (kwargs or {}).items()}
        )


def values_of(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a weight in `dtype`, whether it is gathered or not; not a copy if it has
    them.
    """
    if isinstance(w_NK, Gathered):
        return w_NK.source.values(dtype)
    return w_NK.to(dtype)


def _is_whole_view(func: Any, args: Any, own: Gathered) -> bool:
    if func is torch.ops.aten.view.default:  # DTensor.to_local
        return tuple(args[1]) == own.shape
    return (
        func is torch.ops.aten.as_strided.default
        and tuple(args[1]) == own.shape
        and tuple(args[2]) == own.stride()
    )


def _master(value: Any) -> Any:
    if isinstance(value, Gathered):
        return value.source.master()
    if isinstance(value, (list, tuple)):
        return _with_masters(value)
    return value


def _with_masters(values: Any) -> Any:
    return type(values)(_master(value) for value in values)
