"""`train.cuda_graph=true`: an optimizer step is recorded once as a CUDA graph and then replayed.

A small model's step is thousands of kernels that take the host longer to queue than the GPU to run.
A graph queues all of them at once: forward and backward of every microbatch, the gradients' norm,
its test, and the optimizer.

A replay repeats the same kernels on the same addresses with the same host numbers. What changes
from step to step must therefore lie in device memory, and is written there before each replay:

    tokens and targets     copied into the buffers that the recorded step reads
    learning rate          float32, read by torch's fused AdamW
    random bits            counters of the step, read by the quantisers (`random.write_step_counters`)
    a model's own random   torch's generator, seeded anew; CUDA graphs read its state from device memory
    an earlier failure     the flag that holds the optimizer back
    delayed scaling        histories at fixed addresses, into which the recorded step writes the new ones

`why_not` gives the reason where a step depends on the host in another way. Where the plan
changes (a phase, a swap), the graph is dropped, and recorded again after `WARM_UP` steps: these
compile kernels and fill caches. Measured and audited steps, evaluations and checkpoints run outside
of the graph, on the same weights and moments.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fp4train.config import Config
from fp4train.data.stream import Rows
from fp4train.errors import UserError
from fp4train.nn.executors import executor_class
from fp4train.optim import takes_flags
from fp4train.precision import Recipe
from fp4train.precision.layers import find_blocks
from fp4train.precision.plan import Plan, PlannedStretch
from fp4train.quantize.random import write_step_counters
from fp4train.run.queued import Queued
from fp4train.run.run import Run
from fp4train.run.step import EagerSteps, Scaling
from fp4train.text import first_line

T = TypeVar("T")

WARM_UP = 3
"""Steps that run eagerly before one is recorded."""


class Recorder(Protocol):
    """Records what a function queues on the device, and queues it again."""

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run `work` as it will be recorded, without recording it."""

    def record(self, work: Callable[[], T]) -> T:
        """Record `work` without running it; the tensors that it returns get their values from each
        replay.
        """

    def replay(self) -> None:
        """Queue what was recorded."""


class CudaRecorder:
    """`torch.cuda.CUDAGraph`, with a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run `work` on the stream that records, so that what autograd remembers of streams is the
        same.
        """
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            value = work()
        here.wait_stream(self._stream)
        return value

    def record(self, work: Callable[[], T]) -> T:
        # "thread_local": other threads page-lock rows and copy checkpoints meanwhile, which
        # "global" takes for errors.
        with torch.cuda.graph(self._graph, None, self._stream, "thread_local"):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class _Recorded(NamedTuple):
    """A recorded step and the device memory that it reads and writes."""

    recorder: Recorder
    inputs: list[Rows]
    failed_before: Tensor
    scaling: Scaling
    queued: Queued
    failed: Tensor


class RecordedSteps:
    """Queues the steps of `run`: eagerly at first, then as replays of a recorded one.

    Args:
        recorder: makes the recorder of a stretch; another than `CudaRecorder` emulates one in
            tests.
    """

    def __init__(
        self, run: Run, recorder: Callable[[torch.device], Recorder] = CudaRecorder
    ) -> None:
        self.run, self._eager, self._make = run, EagerSteps(run), recorder
        self._of: PlannedStretch | None = None
        self._recorder: Recorder | None = None
        self._recorded: _Recorded | None = None
        self._warm = 0
        self._shown = False
        self.counters: Tensor | None = None
        self._counters = torch.zeros(8, dtype=torch.int32, device=run.device)
        self._lr = torch.zeros((), dtype=torch.float32, device=run.device)

    def step(self, recipe: Recipe, rows: Iterable[Rows]) -> Queued:
        """Queue the step that `run.step` is at.

        Raises:
            UserError: the step cannot be recorded. The weights are as they were before it then.
        """
        recorder = self._begin()
        self._lr.fill_(self.run.optimizer.param_groups[0]["lr"])
        warms_up = self._recorded is None and self._warm < WARM_UP
        if warms_up or self._shown:
            self._warm += 1
            # So that the kernels which read these numbers are compiled and loaded.
            with self._on_the_device(), nothing_drawn(self.run):
                return recorder.warm_up(lambda: self._eager.step(recipe, rows))
        batch = list(rows)
        if self._recorded is None:
            self._recorded = self._record(recorder, recipe, batch)
        return self._replay(self._recorded, batch)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """A context in which steps are queued kernel by kernel, reading what recorded ones read."""
        self._shown = True
        try:
            yield
        finally:
            self._shown = False

    def drop(self) -> None:
        """Forget what is recorded and free its memory; the next steps warm up for another
        recording.
        """
        self._recorded = self._recorder = None
        self._warm = 0

    def _begin(self) -> Recorder:
        """The recorder of the stretch that `run.step` is in; what belongs to the step is written to
        the device.
        """
        stretch = self.run.course.plan.at(self.run.step)
        previous = self._of
        self._of = stretch
        if previous is not None and (previous.recipe, previous.layers) != (
            stretch.recipe,
            stretch.layers,
        ):
            self.drop()
        if self._recorder is None:
            self._recorder = self._make(self.run.device)
        write_step_counters(self._counters, self.run.step)
        return self._recorder

    def _refused(self, error: Exception) -> Exception:
        """The exception where recording raised `error`: nothing has run, and nothing stays
        recorded.
        """
        self.drop()
        if isinstance(error, torch.OutOfMemoryError):
            return error
        return UserError(
            f"train.cuda_graph=true: step {self.run.step} cannot be recorded: "
            f"{first_line(error).rstrip('.')}. "
            "Go on with train.cuda_graph=false"
        )

    def _record(self, recorder: Recorder, recipe: Recipe, batch: list[Rows]) -> _Recorded:
        run = self.run
        inputs = [(tokens.clone(), targets.clone()) for tokens, targets in batch]
        failed_before = torch.zeros((), dtype=torch.bool, device=run.device)
        failed = run.failed
        scaling = _copy_of(run.scaling())

        def step() -> tuple[Queued, Tensor]:
            run.failed = failed_before
            queued = self._eager.step(recipe, inputs)
            assert run.failed is not None
            _write(run.scaling(), scaling)
            return queued, run.failed

        run.load_scaling(scaling)
        try:
            with self._on_the_device():
                queued, failed_after = recorder.record(step)
        except RuntimeError as error:
            run.mid_update, run.failed = False, failed  # nothing has run
            raise self._refused(error) from error
        run.failed = failed
        run.load_scaling(_copy_of(scaling))
        return _Recorded(recorder, inputs, failed_before, scaling, queued, failed_after)

    @contextmanager
    def _on_the_device(self) -> Iterator[None]:
        """Context in which step and learning rate are read from device memory, and not from the
        host.
        """
        groups = self.run.optimizer.param_groups
        saved_groups = [{"lr": group["lr"], "capturable": group["capturable"]} for group in groups]
        for group in groups:
            group.update(lr=self._lr, capturable=True)
        self.counters = self._counters
        try:
            yield
        finally:
            self.counters = None
            for group, values in zip(groups, saved_groups, strict=True):
                group.update(values)

    def _replay(self, recorded: _Recorded, batch: list[Rows]) -> Queued:
        run = self.run
        for here, rows in zip(recorded.inputs, batch, strict=True):
            here[0].copy_(rows[0])
            here[1].copy_(rows[1])
        if run.failed is None:
            recorded.failed_before.zero_()
        else:
            recorded.failed_before.copy_(run.failed)
        _write(run.scaling(), recorded.scaling)
        run.mid_update = True
        recorded.recorder.replay()
        if any(recorded.scaling.values()):
            run.load_scaling(_copy_of(recorded.scaling))  # the next replay overwrites it
        run.failed = recorded.failed
        # The next replay overwrites them, and a step's numbers are read after that.
        return recorded.queued._replace(numbers=recorded.queued.numbers.clone())


def _copy_of(scaling: Scaling) -> Scaling:
    """Copies in memory of their own."""
    return {
        layer: {name: tensor.clone() for name, tensor in state.items()}
        for layer, state in scaling.items()
    }


def _write(source: Scaling, target: Scaling) -> None:
    if changed := [
        (target[layer][name], tensor)
        for layer, state in source.items()
        for name, tensor in state.items()
    ]:
        torch._foreach_copy_([here for here, _ in changed], [tensor for _, tensor in changed])


@contextmanager
def nothing_drawn(run: Run) -> Iterator[None]:
    """Around a step that runs before one is recorded: of a model that recomputes activations,
    whether its blocks draw from torch's generator in their forward passes (dropout). Recomputation
    would have to read the generator's state on the host to draw the same again, so that it leaves
    the state alone in such steps (`precision.recompute`).

    Kernels of Transformer Engine that round gradients draw from it in backward alone, which nothing
    repeats.

    Raises:
        UserError: one does, before anything has changed.
    """
    state = (
        torch.cuda.get_rng_state if run.device.type == "cuda" else lambda _: torch.get_rng_state()
    )
    saved_states: dict[nn.Module, Tensor] = {}

    def check(block: nn.Module, *_: Any) -> None:
        if not torch.equal(saved_states.pop(block), state(run.device)):
            raise UserError(
                "train.cuda_graph=true with model.recompute=true: the model draws random "
                "numbers in forward "
                "(dropout, or x that Transformer Engine rounds stochastically), whose "
                "generator the host would read in "
                "every recomputed block; choose smaller microbatches instead of recomputation"
            )

    with ExitStack() as stack:
        for block in find_blocks(run.model) if recomputing(run.model) else ():
            begun = block.register_forward_pre_hook(
                lambda module, _: saved_states.update({module: state(run.device)})
            )
            stack.enter_context(begun)
            stack.enter_context(block.register_forward_hook(check))
        yield


def recomputing(model: nn.Module) -> list[Any]:
    """The parts of a model that recompute the activations of their blocks."""
    return [module for module in model.modules() if getattr(module, "recomputes", False)]


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
