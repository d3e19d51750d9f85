"""Norms and gates of a run that quantise their results where they are made
(`nn/fused_layers.py`), by stretch, and why others do not.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fp4train.config.schema import TrainSettings
from fp4train.hardware import Gpu
from fp4train.nn.executors import make_executor
from fp4train.nn.fused_layers import FusedLayers, why_padded
from fp4train.nn.normed_linears import NormedLinears
from fp4train.precision.plan import PlannedStretch
from fp4train.quantize import triton, triton_launch
from fp4train.text import first_few, ranges

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"\bblocks\.\d+\.[\w.]+")
"""The name of a layer of a block, in a reason."""
_WRITTEN_FASTER = (9, 0)
"""Compute capability on which kernels of norms and gates that make codes were measured to take
longer than two kernels that do the same through BF16.
"""
_NAMED = 6
"""Most norms and gates that a warning names."""
_BLOCK = re.compile(r"\bblocks\.(\d+)\.(.+)")
"""The name of a module: the number of its block, and its name there."""


def fused_layers(model: nn.Module) -> Iterator[FusedLayers]:
    """The norms and gates of `model` that may quantise their results for the layers that read
    them, as its modules say.
    """
    for module in model.modules():
        if isinstance(module, FusedLayers) and module.readers:
            yield module


def why_not_produced(train: TrainSettings, device: str, *, elsewhere: bool = False) -> str | None:
    """Why no norm or gate of a run quantises its result, whatever its plan; None: its plan
    decides.
    """
    if train.kernels == "torch":
        return "train.kernels=torch asks for torch's operators"
    if train.compile:
        return "with train.compile the compiler has the blocks"
    if elsewhere:
        return None
    return triton.why_not_here(device)


def why_not_own_kernels(device: str, gpu: Gpu | None = None) -> str | None:
    """Why norms and gates do not make codes in this project's own kernels, those of a backend
    aside; None: they may.

    Args:
        gpu: a GPU of another machine.
    """
    capability = None
    if gpu is not None:
        capability = gpu.capability
    elif device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    if capability != _WRITTEN_FASTER:
        return None
    return (
        "on compute capability 9.0 two kernels, which write BF16 and quantise it, take less time "
        "than one, as measured on an H200"
    )


def check_asked(model: nn.Module) -> None:
    """Look at a model after its first step: norms and gates that may quantise their results and
    were not called for them are logged as one warning.
    """
    names = {module: name for name, module in model.named_modules()}
    if silent := [
        names[fused.owner] for fused in fused_layers(model) if fused.enabled and not fused.asked
    ]:
        _log.warning(
            "%s: not asked for quantised results in the first step. They write BF16, whatever the "
            "plan says: the `forward` of their class, or of its block, does not call their "
            "NormedLinears or GatedMLP",
            first_few(silent, _NAMED),
        )


class ProducedNorms(NamedTuple):
    """Norms and gates of a model in one stretch of a run.

    producers: by module, of those that quantise their results; writing: why others write BF16, by
        name.
    """

    producers: dict[nn.Module, FusedLayers]
    writing: dict[str, str]


def produced_in(
    model: nn.Module,
    stretch: PlannedStretch,
    train: TrainSettings,
    device: str,
    tokens: int,
    *,
    gpu: Gpu | None = None,
) -> ProducedNorms:
    """Norms and gates that quantise their results in a stretch, in passes of so many tokens, and
    why others do not.

    Args:
        gpu: a GPU of another machine, which is taken to have Triton and the newest backends.
    """
    norms = ProducedNorms({}, {})
    names = {module: name for name, module in model.named_modules()}
    why_not_any = why_not_produced(train, device, elsewhere=gpu is not None)
    for fused in fused_layers(model):
        fused.why_not_own = why_not_own_kernels(device, gpu)
        reason = why_not_any or fused.why_never()
        if reason is None:
            plans = [stretch.layers[layer.layer.name] for layer in fused.layers]
            reason = next(
                (f"{plan.layer.name} is cut over ranks" for plan in plans if plan.layer.cut), None
            )
        if reason is None:
            executors = [make_executor(plan, device) for plan in plans]
            reason = fused.resolve(executors, here=gpu is None) or why_padded(executors, tokens)
        if reason is None:
            norms.producers[fused.owner] = fused
        else:
            norms.writing[names[fused.owner]] = _LAYER.sub("a layer", reason)
    return norms


def producers_of(stretches: Iterable[ProducedNorms]) -> list[FusedLayers]:
    """The norms and gates that quantise their results in any of these stretches."""
    return [fused for norms in stretches for fused in norms.producers.values()]


def produced_by(
    model: nn.Module,
    stretches: Sequence[PlannedStretch],
    norms: Sequence[ProducedNorms],
    device: str,
) -> list[str]:
    """Sentences on the norms and gates that quantise their results, and why others do not; none of
    a CPU, whose layers multiply values.

    Args:
        norms: how they run in each stretch; the steps of a stretch are said where stretches
            differ.
    """
    if device == "cpu" and not triton_launch.interpreted():
        return []
    names = {module: name for name, module in model.named_modules()}
    reasons: dict[str, list[str]] = {}
    for stretch, norms_here in zip(stretches, norms, strict=True):
        why: dict[str, list[str]] = {}
        for name, reason in norms_here.writing.items():
            why.setdefault(reason, []).append(name)
        lines = [
            f"{len(group)} norms and gates write BF16 ({_places(group)}): {r}."
            for r, group in why.items()
        ]
        if here := [names[owner] for owner in norms_here.producers]:
            done = (
                f"{len(here)} norms and gates are quantised where they are made ({_places(here)})"
            )
            by_fp4train = [
                not producer.by_backend
                for producer in norms_here.producers.values()
                if isinstance(producer, NormedLinears)
            ]
            which = "these" if all(by_fp4train) else sum(by_fp4train)
            if any(by_fp4train):
                adds = f"; {which} norms also add what a layer returns to the residual stream"
            else:
                adds = ""
            lines.insert(0, f"{done}, and not written in BF16{adds}.")
        reasons[stretch.title.partition(":")[0]] = lines
    if len({tuple(lines) for lines in reasons.values()}) == 1:
        return next(iter(reasons.values()))
    return [f"{steps}: {line}" for steps, lines in reasons.items() for line in lines]


def _places(names: Sequence[str]) -> str:
    """ "attention_norm, mlp_norm, mlp of blocks 0–4; norm": modules by their blocks."""
    kinds: dict[int, list[str]] = {}
    single = []
    for name in names:
        if (match := _BLOCK.search(name)) is None:
            single.append(name)
        else:
            kinds.setdefault(int(match[1]), []).append(match[2])
    alike: dict[str, list[int]] = {}
    for number, mine in kinds.items():
        alike.setdefault(", ".join(mine), []).append(number)
    places = [
        f"{mine} of block{'s' * (len(where) > 1)} {ranges(where)}" for mine, where in alike.items()
    ]
    return "; ".join(places + single)
