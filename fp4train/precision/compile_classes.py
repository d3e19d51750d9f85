"""Classes whose objects compiled graphs take as inputs: torch's private interface, by the names of
torch 2.14 and newer or by those of 2.13 and older. Imported only while torch.compile traces.

| torch 2.14 | torch 2.13 |
|---|---|
| `torch._custom_class_base.CustomClassBaseMeta` | `torch._opaque_base.OpaqueBaseMeta` |
| `torch._library.opaque_object.register_custom_class` | `register_opaque_type` |
| `typ="symbolic"` | `typ="reference"` |
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_RENAMED = find_spec("torch._custom_class_base") is not None
_registry = import_module("torch._library.opaque_object")

Metaclass: type = (
    import_module("torch._custom_class_base").CustomClassBaseMeta
    if _RENAMED
    else import_module("torch._opaque_base").OpaqueBaseMeta
)
"""The metaclass of all such classes."""


def register(
    cls: type, *, guard: Callable[[Any], list[Any]] | None = None, constant: tuple[str, ...] = ()
) -> None:
    """Let operators take and return objects of `cls`, a class of `Metaclass`, as inputs of a graph.

    Args:
        guard: the values of an object that a graph depends on; where they change, the graph is
            traced again.
        constant: methods whose results tracing takes as constants.
    """
    members = dict.fromkeys(constant, _registry.MemberType.USE_REAL)
    if _RENAMED:
        _registry.register_custom_class(cls, typ="symbolic", guard_fn=guard, members=members)
    else:
        _registry.register_opaque_type(cls, typ="reference", guard_fn=guard, members=members)
