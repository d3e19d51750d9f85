"""Norms and gates of a run that quantise their results where they are made (`nn/produced.py`), by
stretch, and why others do not.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from torch import nn

from fp4train.config.schema import TrainSettings
from fp4train.nn.executors import make_executor
from fp4train.nn.gated_mlp import FusedGatedMLP
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.linear import Linear
from fp4train.nn.planned import PlannedLayer
from fp4train.nn.produced import NormProducer, Producer, why_padded
from fp4train.parameters import INPUT, declared
from fp4train.precision.plan import PlannedStretch
from fp4train.quantize import triton, triton_launch
from fp4train.text import first_few, ranges

_log = logging.getLogger(__name__)

_LAYER = re.compile(r"\bblocks\.\d+\.[\w.]+")
"""The name of a layer of a block, in a reason."""
_NAMED = 6
"""Most norms and gates that a warning names."""
_BLOCK = re.compile(r"\bblocks\.(\d+)\.(.+)")
"""The name of a module: the number of its block, and its name there."""


def producers_of(model: nn.Module) -> Iterator[tuple[nn.Module, Producer | str]]:
    """Each norm and gate of `model` that may quantise its result, as its table of parameters says
    (`ParameterSpec.reads`), with its producer, or why none is possible.
    """
    readers: dict[str, list[nn.Module]] = {}
    writers: dict[str, list[nn.Module]] = {}
    for spec in declared(model).values():
        if spec.reads not in ("", INPUT):
            readers.setdefault(spec.reads, []).append(model.get_submodule(spec.layer))
        if spec.gates:
            writers.setdefault(spec.gates, []).append(model.get_submodule(spec.layer))
    for name, modules in readers.items():
        owner = model.get_submodule(name)
        made_by = writers.get(name, [])
        layers = [module for module in modules if isinstance(module, PlannedLayer)]
        sources = [module for module in made_by if isinstance(module, PlannedLayer)]
        unplanned = [
            module for module in (*modules, *made_by) if not isinstance(module, PlannedLayer)
        ]
        if not hasattr(owner, "producer"):
            yield owner, f"{type(owner).__name__} asks no producer"
        elif unplanned:
            kind = type(unplanned[0]).__name__
            yield owner, f"a module that takes no codes ({kind}) reads the same"
        elif sources:
            yield owner, FusedGatedMLP(*cast(Sequence[Linear], (*sources, *layers)))
        else:
            yield owner, NormProducer(layers, kind=getattr(owner, "source", "norm"))


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


def check_asked(model: nn.Module) -> None:
    """Look at a model after its first step: norms and gates that it did not ask their producer for
    are logged as one warning.
    """
    producers = (
        (name, getattr(module, "producer", None)) for name, module in model.named_modules()
    )
    if silent := [
        name
        for name, producer in producers
        if isinstance(producer, Producer) and not producer.asked
    ]:
        _log.warning(
            "%s: read by the layers that the table of parameters says, and no producer was asked "
            "in the first step. "
            "They write BF16, whatever "
            "the plan says: the `forward` of their class asks none",
            first_few(silent, _NAMED),
        )


class ProducedNorms(NamedTuple):
    """Norms and gates of a model in one stretch of a run.

    producers: by module, of those that quantise their results; writing: why others write BF16, by
        name.
    """

    producers: dict[nn.Module, Producer]
    writing: dict[str, str]


def produced_in(
    model: nn.Module,
    stretch: PlannedStretch,
    train: TrainSettings,
    device: str,
    tokens: int,
    *,
    elsewhere: bool = False,
    amax: LayerShard | None = None,
) -> ProducedNorms:
    """Norms and gates that quantise their results in a stretch, in passes of so many tokens, and
    why others do not.

    Args:
        elsewhere: on a GPU of another machine, which is taken to have Triton and the newest
            backends.
        amax: the ranks that share an amax, for layers that are not cut; None: there are
            none.
    """
    norms = ProducedNorms({}, {})
    names = {module: name for name, module in model.named_modules()}
    why_not_any = why_not_produced(train, device, elsewhere=elsewhere)
    for owner, producer in producers_of(model):
        reason = why_not_any or (producer if isinstance(producer, str) else None)
        if reason is None and isinstance(producer, Producer):
            plans = [
                stretch.layers[layer.layer.name] for layer in (*producer.readers, *producer.writers)
            ]
            reason = next(
                (f"{plan.layer.name} is cut over ranks" for plan in plans if plan.layer.cut), None
            )
            if reason is None:
                executors = [make_executor(plan, device, amax) for plan in plans]
                reason = producer.resolve(executors, here=not elsewhere) or why_padded(
                    executors, tokens
                )
            if reason is None:
                norms.producers[owner] = producer
        if reason is not None:
            norms.writing[names[owner]] = _LAYER.sub("a layer", reason)
    return norms


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
                if isinstance(producer, NormProducer)
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
