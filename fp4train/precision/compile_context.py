"""Register the autocast context with torch.compile, as an opaque graph input. Imported only during tracing.

A graph reads the context that is current when it runs. It is valid for every context with the same `activation_dtype`.
The backward graph has the same input, so activations that it recomputes see the same context.
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
