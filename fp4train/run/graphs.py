"""`train.cuda_graph`: what records the steps of a run, and the reasons why some cannot be recorded.

A CUDA graph repeats what the device was given. So a step is recorded only if nothing of what it
gives the device depends on numbers that the host reads or counts.
"""

from fp4train.config import Config
from fp4train.errors import UserError
from fp4train.nn.executors import executor_class
from fp4train.optim import takes_flags
from fp4train.precision.plan import Plan, PlannedStretch
from fp4train.run.run import Run
from fp4train.run.step_graph import RecordedSteps


def recorded(run: Run) -> RecordedSteps:
    """The runner that queues the steps of `run` as `train.cuda_graph` says.

    Raises:
        UserError: it is not possible.
    """
    check_graph(run)
    return RecordedSteps(run)


def check_graph(run: Run) -> None:
    """Whether `train.cuda_graph=true` is possible for `run`, whatever its recipes.

    Raises:
        UserError: it is not; the message says why, and what to do instead.
    """
    config = run.config
    optimizer = run.optimizer
    reason = None
    if run.device.type != "cuda":
        reason = f"it records the work of a GPU, and the run is on device={run.device.type}"
    elif run.world.size > 1:
        ranks = run.world.size
        reason = (
            f"steps of {ranks} ranks are not recorded: their collectives wait for each other on "
            "the host"
        )
    elif run.teacher is not None:
        reason = (
            "a teacher runs beside the model in every microbatch, and its passes are not recorded"
        )
    elif not run.data.training.all_scored:
        reason = "the loss is divided by the answers of each batch, which the host counts"
    elif config.train.compile:
        reason = "train.compile=true queues blocks in graphs of its own; choose one of the two"
    elif not takes_flags(optimizer) or not all(
        group.get("fused") and "capturable" in group for group in optimizer.param_groups
    ):
        reason = (
            f"{type(config.optim).__name__} decides on the host; torch's fused optimizers "
            "(optim=adamw) do not"
        )
    if reason is not None:
        raise UserError(f"train.cuda_graph=true: {reason}. Or use train.cuda_graph=false")


def never_replayed(config: Config, device: str) -> str | None:
    """The warning of a run whose audits let no recorded step be replayed; None: all is well."""
    every = config.audit.steps(device)
    if not config.train.cuda_graph or not 0 < every <= 2:
        return None
    return (
        f"train.cuda_graph=true replays no step with audit.every={every}: an audited step and the "
        "one before it are queued kernel by kernel; use audit.every=10 or more, or "
        "train.cuda_graph=false"
    )


def check_plan(plan: Plan) -> None:
    """Whether the steps of all stretches can be recorded.

    Raises:
        ValueError: one cannot; the message names recipe, layer and operand.
    """
    for stretch in plan.stretches:
        if reason := why_not(stretch):
            raise ValueError(
                f"train.cuda_graph=true cannot record {stretch.title}: {reason}. "
                "Use train.cuda_graph=false, or another recipe"
            )


def why_not(stretch: PlannedStretch) -> str | None:
    """Why a step of `stretch` depends on the host; None if it can be recorded."""
    if stretch.recipe.loss_scaling is not None:
        return (
            f"recipe {stretch.recipe.name}: the host sets its loss scale from the gradients of "
            "the step before"
        )
    reasons = (executor_class(plan).why_no_graph(plan) for plan in stretch.layers.values())
    return next(filter(None, reasons), None)
