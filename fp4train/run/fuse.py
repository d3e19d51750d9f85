"""Kernels of what lies between the products of a model: torch's operators, Liger's, C kernels, or
torch.compile's for blocks.
"""

import importlib
import logging
from collections import Counter
from typing import Any

import torch
from torch import nn

from fp4train.config.schema import TrainSettings
from fp4train.errors import UserError
from fp4train.kernels import cpu
from fp4train.models.common import liger, on_cpu
from fp4train.models.common.operators import operations_of, use
from fp4train.precision.layers import find_blocks

_log = logging.getLogger(__name__)

COMPILED_VARIANTS = 64
"""Graphs that blocks may need: training and evaluation, layers kept in high precision, operands
that phases change.
"""


def kernels_of(train: TrainSettings, device: str, *, elsewhere: bool = False) -> tuple[bool, str]:
    """(Whether what lies between the products runs in Liger's kernels on devices of this type; a
    sentence that says which kernels run it, and why.)

    Args:
        elsewhere: on a machine that is not this one, which is taken to have the package.

    Raises:
        UserError: `train.kernels` names Liger's, and they do not run.
    """
    what = "Norms, gates, rotations and the loss run in"
    if train.kernels == "torch":
        return False, f"{what} torch's operators: train.kernels=torch asks for them."
    if _in_c(train, device):
        return False, f"The loss runs in torch's operators (train.kernels={train.kernels})."
    if (reason := None if elsewhere else liger.why_not(device)) is None:
        if train.compile:
            what = "The loss runs"
        else:
            what = what.removesuffix(" in")
        return True, f"{what} in liger's kernels (train.kernels={train.kernels})."
    if train.kernels == "liger":
        raise UserError(
            f"train.kernels=liger: {reason}; train.kernels=torch needs no other package"
        )
    return (
        False,
        f"{what} torch's operators, not in liger's kernels: {reason} (train.kernels=auto).",
    )


def _in_c(train: TrainSettings, device: str) -> bool:
    """Whether C kernels make what they can; of compiled blocks the compiler does."""
    return (
        device == "cpu"
        and train.kernels == "auto"
        and not train.compile
        and cpu.unavailable() is None
    )


def operations_in_c(
    model: nn.Module, train: TrainSettings, device: str, dtype: torch.dtype, tokens: int
) -> list[str]:
    """Sentences on the norms, gates and rotations that C kernels make in a pass of so many tokens,
    with activations of `dtype`, and why they do not make others.
    """
    if not _in_c(train, device):
        return []
    operations = [operation for operation in operations_of(model) if operation.software is None]

    def why_not(kind: str, width: int) -> str | None:
        if kind == "gate" and not on_cpu.whole_vectors(tokens * width):
            return (
                f"{tokens} tokens of {width} features do not fill the vectors of "
                f"{torch.get_num_threads()} threads"
            )
        return on_cpu.why_not(kind, width, dtype)

    reasons = Counter(why_not(operation.kind, operation.width) for operation in operations)
    return [
        f"{count} norms, gates and rotations run in "
        + (
            "C kernels, in the bits of torch's operators."
            if reason is None
            else f"torch's operators: {reason}."
        )
        for reason, count in reasons.items()
    ]


def kernels_of_layers(model: nn.Module, device: str, *, deterministic: bool) -> list[str]:
    """Sentences of a model's layers on the software that computes them on devices of this type,
    each once.

    A layer that can take kernels of other software says so by `Operation.software`.
    """
    softwares = [operation.software for operation in operations_of(model)]
    sentences = (software(device, deterministic) for software in softwares if software)
    return list(dict.fromkeys(sentences))


def fuse(model: nn.Module, train: TrainSettings, device: str) -> None:
    """Liger's kernels, or C kernels, where `train.kernels` asks for them and they run; of compiled
    blocks the compiler fuses.
    """
    used, reason = kernels_of(train, device)
    if _in_c(train, device):
        use(model, on_cpu.CpuOperators())
    if used:
        liger.use_liger(model, spare=find_blocks(model) if train.compile else [])
    if device == "cuda" and train.kernels != "torch":
        _log.info("%s", reason)


def compile_blocks(model: nn.Module, train: TrainSettings, device: torch.device) -> None:
    """Let torch.compile have the blocks if it is to, each by itself: those that are alike share a
    graph.
    """
    if not train.compile:
        return
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise UserError(
                "train.compile=true needs a C++ compiler on a CPU, and none is found (CXX, PATH)"
            ) from error
    # As an option of `compile` it is new in torch 2.12.
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, COMPILED_VARIANTS)
    for block in find_blocks(model):
        block.compile()
