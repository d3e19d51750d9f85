"""`train.cuda_graph`: what records the steps of a run, and the reasons why some cannot be recorded.

A CUDA graph repeats what the device was given. So a step, or a block, is recorded only if nothing of what it gives the
device depends on numbers that the host reads or counts.
"""

from collections.abc import Iterable

from fp4train.errors import UserError
from fp4train.nn.call import Recorded
from fp4train.nn.executors import executor_class
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.layers import find_blocks
from fp4train.precision.plan import Plan, PlannedStretch
from fp4train.run.block_graph import RecordedBlocks
from fp4train.run.block_pass import block_parts
from fp4train.run.run import Run
from fp4train.run.step_graph import GraphSteps, RecordedSteps


def recorded(run: Run) -> GraphSteps:
    """The runner that queues the steps of `run` as `train.cuda_graph` says.

    Raises:
        UserError: it is not possible.
    """
    if run.config.train.cuda_graph == "block":
        check_blocks(run)
        return RecordedBlocks(run)
    check_graph(run)
    return RecordedSteps(run)


def check_graph(run: Run) -> None:
    """Whether `train.cuda_graph=true` is possible for `run`, whatever its recipes.

    Raises:
        UserError: it is not; the message says why, and what to do instead.
    """
    config, optimizer = run.config, run.optimizer
    reason = None
    if run.device.type != "cuda":
        reason = f"it records the work of a GPU, and the run is on device={run.device.type}"
    elif run.world.size > 1:
        reason = (
            f"steps of {run.world.size} ranks are not recorded: their collectives wait for each other on the host. "
            "train.cuda_graph=block records the blocks"
        )
    elif run.teacher is not None:
        reason = "a teacher runs beside the model in every microbatch, and its passes are not recorded"
    elif run.train_data.tokens.scored is not None:
        reason = "the loss is divided by the answers of each batch, which the host counts"
    elif config.train.compile:
        reason = "train.compile=true queues blocks in graphs of its own; choose one of the two"
    elif not getattr(optimizer, "_step_supports_amp_scaling", False) or not all(
        group.get("fused") and "capturable" in group for group in optimizer.param_groups
    ):
        reason = f"{type(config.optim).__name__} decides on the host; torch's fused optimizers (optim=adamw) do not"
    if reason is not None:
        raise UserError(f"train.cuda_graph=true: {reason}. Or use train.cuda_graph=false")


def check_blocks(run: Run) -> None:
    """Whether `train.cuda_graph=block` is possible for `run`, whatever its recipes.

    Raises:
        UserError: it is not; the message says why, and what to do instead.
    """
    reason = None
    if run.device.type != "cuda":
        reason = f"it records the work of a GPU, and the run is on device={run.device.type}"
    elif find_blocks(run.model) == [run.model]:
        reason = "the model has no blocks"
    elif not any(recorded for block in find_blocks(run.model) for _, recorded in block_parts(block)):
        reason = "the host reads how many rows each expert has, and all blocks of the model have experts"
    if reason is not None:
        raise UserError(f"train.cuda_graph=block: {reason}. Or use train.cuda_graph=false")


def check_plan(plan: Plan, mode: bool | str = True) -> None:
    """Whether the steps of all stretches, or with mode="block" their blocks, can be recorded.

    Raises:
        ValueError: one cannot; the message names recipe, layer and operand.
    """
    for stretch in plan.stretches:
        if reason := why_not(stretch, "block" if mode == "block" else "step"):
            routed = any(each.layer.experts for each in stretch.layers.values())
            other = ", or block, which leaves experts to the host" if routed else ", or another recipe"
            raise ValueError(
                f"train.cuda_graph={str(mode).lower()} cannot record {stretch.title}: {reason}. "
                f"Use train.cuda_graph=false{other}"
            )


def why_not(stretch: PlannedStretch, recorded: Recorded) -> str | None:
    """Why a step of `stretch`, or a block's passes in it but for those of experts, depend on the host; None if they can
    be recorded."""
    if recorded == "step" and stretch.recipe.loss_scaling is not None:
        return f"recipe {stretch.recipe.name}: the host sets its loss scale from the gradients of the step before"
    layers: Iterable[LayerPlan] = stretch.layers.values()
    if recorded == "block":
        layers = (each for each in layers if each.layer.block is not None and not each.layer.experts)
    return next(filter(None, (executor_class(each).why_no_graph(each, recorded) for each in layers)), None)
