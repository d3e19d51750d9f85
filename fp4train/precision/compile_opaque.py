"""The context as torch.compile sees it: an opaque object that a graph takes as an input. Imported only while it traces.

A graph reads the context that is current when it runs, and holds for every context of the same `activation_dtype`. The
graph's backward has that input too, so that what it recomputes needs nothing else.
"""

from __future__ import annotations

import torch
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBaseMeta

from fp4train.precision.context import Context


class _Probe(metaclass=OpaqueBaseMeta):
    """An opaque class that an operator returns, which torch before 2.13 refuses with a ValueError."""


def _returns_opaque(x):  # type: ignore[no-untyped-def]  # its annotations, which are no text, follow
    return x, _Probe()


# All or nothing: contexts are made opaque only where the layers' operator can be had too.
_returns_opaque.__annotations__ = {"x": torch.Tensor, "return": tuple[torch.Tensor, _Probe]}
register_opaque_type(_Probe, typ="reference")
torch.library.infer_schema(_returns_opaque, mutates_args=())

Context.__class__ = OpaqueBaseMeta  # type: ignore[assignment]
register_opaque_type(
    Context,
    typ="reference",
    guard_fn=lambda context: [context.activation_dtype()],
    members={"activation_dtype": MemberType.USE_REAL},
)
