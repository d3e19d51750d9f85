"""Cut a converted model into the stages of a pipeline.

Blocks are shared out by what they multiply per token, the head included: see `share_blocks`. Names
stay those of the whole model: layers have been given theirs, with their positions, by `convert`,
and a stage's list of blocks has the whole list's keys.
"""

import copy
from collections.abc import Iterable
from typing import cast

from torch import nn

from fp4train.models.common import Pipelined, Stage, StageCut, multiplied, share_blocks, stage_cut
from fp4train.parallel.config import Parallel
from fp4train.parallel.held import Inventory
from fp4train.parallel.pipeline import Pipeline, TiedWeight
from fp4train.parallel.world import World


def cut_of(model: nn.Module, parallel: Parallel) -> StageCut:
    """How `model` says that it is cut into stages.

    Raises:
        ValueError: it does not say so, leaves weights out, or has fewer blocks than there are
            stages.
    """
    kind = type(model).__name__
    cut = stage_cut(model)
    if cut is None or not hasattr(model, "stage"):
        raise ValueError(
            f"parallel.pp={parallel.pp}: {kind} does not say how it is cut into stages. Give "
            "it a method "
            "fp4train_parameters that says the stage of each, and an attribute stage "
            "(models/llama is an example), or "
            "use parallel.pp=1"
        )
    named = (cut.blocks, *cut.first, *cut.last)
    if left := [
        name for name, _ in model.named_parameters() if name.partition(".")[0] not in named
    ]:
        raise ValueError(
            f"{kind}.fp4train_parameters leaves out {left[0]}: each weight must be in a "
            "block, or on the first or "
            "the last stage"
        )
    blocks = len(_blocks(model, cut))
    stages = parallel.pp * parallel.chunks
    if blocks < stages:
        if parallel.chunks > 1:
            chunks = f" × parallel.pp_chunks={parallel.chunks}"
        else:
            chunks = ""
        most = blocks // parallel.chunks
        if most > 1:
            instead = f"parallel.pp may be at most {most}"
        else:
            instead = "use parallel.pp=1"
        raise ValueError(
            f"{blocks} block{'s' * (blocks != 1)} cannot be divided over "
            f"parallel.pp={parallel.pp}{chunks} stages, which "
            f"need one each; {instead}"
        )
    return cut


def check_microbatches(count: int, parallel: Parallel) -> None:
    """Check that a step's microbatches of a rank fit the schedule of a pipeline.

    Raises:
        ValueError: they do not; it says what to choose.
    """
    pp = parallel.pp
    if count < pp:
        idle = (pp - 1) / (parallel.chunks * count + pp - 1)
        raise ValueError(
            f"{count} microbatch{'es' * (count != 1)} per rank cannot fill parallel.pp={pp} "
            "stages (idle for "
            f"{idle:.0%} of a step): choose a smaller train.microbatch, a larger "
            "train.batch_size or a smaller "
            f"parallel.pp, so that train.batch_size is at least {pp} × train.microbatch × "
            "data ranks"
        )
    if parallel.pp_schedule == "interleaved" and count % (count // pp):
        raise ValueError(
            f"parallel.pp_schedule=interleaved does not take {count} microbatches per rank: "
            "make them a multiple of "
            f"parallel.pp={pp} by train.batch_size or train.microbatch, or use "
            "parallel.pp_schedule=1f1b"
        )


def cut_stages(
    model: nn.Module,
    cut: StageCut,
    inventory: Inventory,
    parallel: Parallel,
    world: World,
    time: int,
) -> Pipeline:
    """This rank's stages of `model`, which shares its modules with them; what it does not hold is
    freed with `model`.

    Args:
        model: a converted model with whole weights, the same on every rank, or on the meta device.
        inventory: its inventory.
        time: tokens of a sequence.
    """
    count = parallel.pp * parallel.chunks
    blocks = _blocks(model, cut)
    shares = share_blocks(*multiplied(model, [*blocks.values()], time), count)
    if inventory.tied:
        tied = TiedWeight(world, parallel.timeout)
    else:
        tied = None

    def part(indices: Iterable[int]) -> nn.Module:
        block_indices = list(indices)
        has_first = 0 in block_indices
        last = count - 1 in block_indices
        names = {
            name
            for index in block_indices
            for name in list(blocks)[shares[index].start : shares[index].stop]
        }
        stage_model = _copy(model)
        for name in (() if has_first else cut.first) + (() if last else cut.last):
            del stage_model._modules[name]
        stack = _copy(model.get_submodule(cut.blocks))
        stack._modules = {name: block for name, block in stack._modules.items() if name in names}
        stage_model._modules[cut.blocks] = stack
        cast(Pipelined, stage_model).stage = Stage(first=has_first, last=last, tie=tied)
        return stage_model

    own_parts = range(world.stage, count, parallel.pp)
    if tied is not None and world.stage == parallel.pp - 1:
        for name in inventory.tied:
            # A copy of its own, which no optimizer sees: it gets the first stage's values after
            # each step.
            parent, _, leaf = name.rpartition(".")
            weight = model.get_parameter(name).detach().clone()
            setattr(model.get_submodule(parent), leaf, nn.Parameter(weight, requires_grad=False))
    stages = {index: part([index]) for index in own_parts}
    if len(own_parts) == 1:
        together = stages[own_parts[0]]
    else:
        together = part(own_parts)
    return Pipeline(
        stages=stages,
        model=together,
        cut=cut,
        inventory=inventory,
        tied=tied,
        parallel=parallel,
        world=world,
    )


def tied_weights(model: nn.Module, cut: StageCut) -> dict[str, str]:
    """Names of the last stage's weights that the first stage has, too → their names there.

    Raises:
        ValueError: more than one is shared, or blocks share some: those would lie on several
            stages.
    """

    def held_weights(paths: tuple[str, ...]) -> dict[int, str]:
        return {
            id(p): f"{path}.{name}"
            for path in paths
            for name, p in model.get_submodule(path).named_parameters()
        }

    of_first = held_weights(cut.first)
    last = held_weights(cut.last)
    tied = {last[key]: of_first[key] for key in last if key in of_first}
    everywhere = [id(p) for block in _blocks(model, cut).values() for p in block.parameters()]
    shared = len(set(everywhere)) < len(everywhere) or set(everywhere) & (set(of_first) | set(last))
    if shared or len(tied) > 1:
        raise ValueError(
            f"parallel.pp: {type(model).__name__} shares weights between blocks, or more than "
            "one between its first "
            "and last stage; a pipeline can share one, of embedding and head. Use parallel.pp=1"
        )
    return tied


def _blocks(model: nn.Module, cut: StageCut) -> dict[str, nn.Module]:
    return dict(model.get_submodule(cut.blocks).named_children())


def _copy(module: nn.Module) -> nn.Module:
    """The module anew, with submodules, parameters and hooks of its own; the buffers are one for
    all.

    FSDP's hooks are those of one stage: in another they would gather that stage's weights, in an
    order of its own.
    """
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and name != "_buffers":
            copied.__dict__[name] = copy.copy(value)
    return copied
