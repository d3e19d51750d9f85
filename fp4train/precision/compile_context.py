"""The context as torch.compile sees it: an opaque object that a graph takes as an input. Imported
only while it traces.

A graph reads the context that is current when it runs, and holds for every context of the same
`activation_dtype`. The graph's backward has that input too, so that what it recomputes needs
nothing else.

The tracer follows an import that fails and gives up there, even inside of `try`; a module that is
imported whole says by a value what this torch lacks.
"""

from collections.abc import Callable
from typing import Any

import torch

from fp4train.precision.settings import Context


def _make_opaque() -> str | None:
    """Register contexts as opaque objects, if layers' operators can return such objects too; else
    why they cannot.
    """
    try:
        from fp4train.precision.compile_classes import Metaclass, register

        class Probe(metaclass=Metaclass):  # type: ignore[metaclass]
            """An opaque class that an operator returns, which torch before 2.13 refuses with a
            ValueError.
            """

        def returns_opaque(x):  # type: ignore[no-untyped-def]  # its annotations, which are no text, follow
            return x, Probe()

        returns_opaque.__annotations__ = {"x": torch.Tensor, "return": tuple[torch.Tensor, Probe]}
        register(Probe)
        torch.library.infer_schema(returns_opaque, mutates_args=())
        Context.__class__ = Metaclass  # type: ignore[method-assign]
        register(
            Context,
            guard=lambda context: [context.activation_dtype()],
            constant=("activation_dtype",),
        )
    except Exception as error:  # whatever a version of torch answers to what it does not know
        return (
            f"torch {torch.__version__} has no operators on opaque objects ({type(error).__name__})"
        )
    return None


UNAVAILABLE = _make_opaque()
"""Why layers cannot be part of a graph with the installed torch, or None where they can."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: object) -> Any:
    """`function(*args)`, nothing of it traced."""
    return function(*args)
