"""Whether torch.compile takes the context as an input of its graphs. Imported only while it traces.

The tracer follows an import that fails and gives up there, even inside of `try`; a module that is imported whole says
by a value what this torch lacks.
"""

from __future__ import annotations

import torch


def _make_opaque() -> str | None:
    try:
        from fp4train.precision import compile_opaque  # noqa: F401
    except Exception as error:  # whatever a version of torch answers to what it does not know
        return f"torch {torch.__version__} has no operators on opaque objects ({type(error).__name__})"
    return None


UNAVAILABLE = _make_opaque()
"""Why layers cannot be part of a graph with the installed torch, or None where they can."""
