"""Norms and gates of a run that quantise their results where they are made
(`nn/fused_layers.py`), by stretch, and why others do not.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from fp4train.config.schema import TrainSettings
from fp4train.hardware import Gpu
from fp4train.nn.executors import make_executor
from fp4train.nn.fused_layers import (
    SourceOutline,
    fused_layers,
    why_not,
    why_not_by_backend,
    why_padded,
)
from fp4train.precision.plan import Plan, PlannedSource, PlannedStretch
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


def with_sources(
    plan: Plan,
    outlines: Sequence[SourceOutline],
    train: TrainSettings,
    device: str,
    *,
    gpu: Gpu | None = None,
) -> Plan:
    """The plan with what the norms and gates of a model do in each stretch.

    Args:
        outlines: those of the whole model (`nn.fused_layers.outlines`).
        device: device type of the model.
        gpu: a GPU of another machine, which is taken to have Triton and the newest backends.
    """
    here = gpu is None
    why_not_any = why_not_produced(train, device, elsewhere=gpu is not None)
    why_not_own = why_not_own_kernels(device, gpu)

    def planned(outline: SourceOutline, stretch: PlannedStretch) -> PlannedSource:
        kind = outline.kind
        reason = why_not_any or outline.why_never
        if reason is not None:
            return PlannedSource(kind=kind, why_written=reason)
        layers = (*outline.readers, *outline.writers)
        for name in layers:
            if stretch.layers[name].layer.cut:
                return PlannedSource(kind=kind, why_written=f"{name} is cut over ranks")
        executors = {name: make_executor(stretch.layers[name], device) for name in layers}
        readers = [executors[name] for name in outline.readers]
        writers = [executors[name] for name in outline.writers]
        reason = why_not(readers, writers, kind, here=here, why_not_own=why_not_own)
        if reason is None:
            reason = why_padded([*readers, *writers], plan.tokens)
        if reason is not None:
            return PlannedSource(kind=kind, why_written=reason)
        return PlannedSource(
            kind=kind,
            readers=outline.readers,
            writers=outline.writers,
            by_backend=why_not_by_backend(readers, kind, here=here) is None,
        )

    stretches = [
        replace(stretch, sources={outline.name: planned(outline, stretch) for outline in outlines})
        for stretch in plan.stretches
    ]
    return replace(plan, stretches=tuple(stretches))


def produced_by(plan: Plan, device: str) -> list[str]:
    """Sentences on the norms and gates that quantise their results, and why others do not; none of
    a CPU, whose layers multiply values. The steps of a stretch are said where stretches differ.
    """
    if device == "cpu" and not triton_launch.interpreted():
        return []
    reasons: dict[str, list[str]] = {}
    for stretch in plan.stretches:
        written: dict[str, list[str]] = {}
        quantised: dict[str, PlannedSource] = {}
        for name, source in stretch.sources.items():
            if source.why_written is None:
                quantised[name] = source
            else:
                why = _LAYER.sub("a layer", source.why_written)
                written.setdefault(why, []).append(name)
        lines = [
            f"{len(group)} norms and gates write BF16 ({_places(group)}): {why}."
            for why, group in written.items()
        ]
        if quantised:
            done = (
                f"{len(quantised)} norms and gates are quantised where they are made "
                f"({_places([*quantised])})"
            )
            lines.insert(0, f"{done}, and not written in BF16{_sums(quantised)}.")
        reasons[stretch.title.partition(":")[0]] = lines
    if len({tuple(lines) for lines in reasons.values()}) == 1:
        return next(iter(reasons.values()))
    return [f"{steps}: {line}" for steps, lines in reasons.items() for line in lines]


def _sums(quantised: Mapping[str, PlannedSource]) -> str:
    """Which of the norms that are quantised also add to the residual stream, in words."""
    norms = [source for source in quantised.values() if source.kind != "gate"]
    adding = sum(source.adds for source in norms)
    if not adding:
        return ""
    which = "these" if adding == len(norms) else adding
    return f"; {which} norms also add what a layer returns to the residual stream"


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
