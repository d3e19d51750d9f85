"""The context as torch.compile sees it: an opaque object that a graph takes as an input. Imported only while it traces.

A graph reads the context that is current when it runs, and holds for every context of the same `activation_dtype`. The
graph's backward has that input too, so that what it recomputes needs nothing else.
"""

from __future__ import annotations

from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBaseMeta

from fp4train.precision.context import Context

Context.__class__ = OpaqueBaseMeta  # type: ignore[assignment]
register_opaque_type(
    Context,
    typ="reference",
    guard_fn=lambda context: [context.activation_dtype()],
    members={"activation_dtype": MemberType.USE_REAL},
)
