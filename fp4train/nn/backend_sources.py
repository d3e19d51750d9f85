"""Norms in a backend's own kernels, which write the codes that its layers read: see
`fused_layers.py`.

The backend's gates take gate and up as one matrix, and give one gradient. Here these are outputs of
two layers, so gates run in the project's own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4train.nn.engine import Executor
from fp4train.nn.executors.whole_layer import BackendLayer


def backend_of(executor: Executor) -> BackendLayer | None:
    """The executor if it is a layer of a backend, else None."""
    if isinstance(executor, BackendLayer):
        return executor
    return None


def why_not(readers: Sequence[Executor], *, here: bool = True) -> str | None:
    """Why a backend's own kernel of a norm does not make the x of the readers; None: it does.

    Args:
        readers: at least one.
        here: see `Sources.why_not_given`.
    """
    plan = readers[0].plan
    for reader in readers:
        name = reader.plan.layer.name
        layer = backend_of(reader)
        if layer is None or layer.backend.name != plan.layer_backend:
            return f"{name} runs elsewhere than {plan.layer.name}"
        if (reason := layer.backend.sources.why_no_norm(layer.table, here=here)) is not None:
            return f"{name}: {reason}"
        if layer.dtype is not torch.bfloat16:
            return f"{name} has operands in {layer.dtype}"
    if any(reader.plan.table != plan.table for reader in readers):
        return "the layers that read it do not quantise x alike"
    return None


def matrix(x: Tensor) -> Tensor:
    """[M, K], its rows contiguous."""
    x = x.detach().reshape(-1, x.shape[-1])
    return x if x.is_contiguous() else x.contiguous()
