"""`train.cuda_graph=true`: an optimizer step is recorded once as a CUDA graph and then replayed.

A small model's step is thousands of kernels that take the host longer to queue than the GPU to run. A graph queues all
of them at once: forward and backward of every microbatch, the gradients' norm, its test, and the optimizer.

A replay repeats the same kernels on the same addresses with the same host numbers. What changes from step to step must
therefore lie in device memory, and is written there before each replay:

    tokens and targets     copied into the buffers that the recorded step reads
    learning rate          float32, read by torch's fused AdamW
    random bits            counters of the step, read by the quantisers (`random.write_step_counters`)
    a model's own random   torch's generator, seeded anew; CUDA graphs read its state from device memory
    an earlier failure     the flag that holds the optimizer back
    delayed scaling        histories at fixed addresses, into which the recorded step writes the new ones

`why_not` gives the reason where a step depends on the host in another way. Where the plan changes (a phase, a swap),
the graph is dropped, and recorded again after `WARM_UP` steps: these compile kernels and fill caches. Measured steps,
evaluations and checkpoints run outside of the graph, on the same weights and moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fp4train.data.loader import Rows
from fp4train.errors import UserError
from fp4train.nn.executors import why_no_graph
from fp4train.precision import Recipe
from fp4train.precision.plan import Plan, PlannedStretch
from fp4train.quantize.random import write_step_counters
from fp4train.run.step import EagerSteps, Queued, Scaling
from fp4train.text import first_line

if TYPE_CHECKING:
    from fp4train.run.run import Run

T = TypeVar("T")

WARM_UP = 3
"""Steps that run eagerly before one is recorded."""


class Recorder(Protocol):
    """Records what a function queues on the device, and queues it again."""

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run `work` as it will be recorded, without recording it."""
        ...

    def record(self, work: Callable[[], T]) -> T:
        """Record `work` without running it; the tensors that it returns get their values from each replay."""
        ...

    def replay(self) -> None:
        """Queue what was recorded."""
        ...


class CudaRecorder:
    """`torch.cuda.CUDAGraph`, with a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, work: Callable[[], T]) -> T:
        """Run `work` on the stream that records, so that what autograd remembers of streams is the same."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            made = work()
        here.wait_stream(self._stream)
        return made

    def record(self, work: Callable[[], T]) -> T:
        # "thread_local": other threads page-lock rows and copy checkpoints meanwhile, which "global" takes for errors.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
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
    """Queues the steps of `run`: eagerly at first, then recorded.

    Args:
        recorder: makes the recorder of a graph; another than `CudaRecorder` emulates one in tests.
    """

    def __init__(self, run: Run, recorder: Callable[[torch.device], Recorder] = CudaRecorder) -> None:
        self.run, self._eager, self._make = run, EagerSteps(run), recorder
        self._of: PlannedStretch | None = None
        self._recorder: Recorder | None = None
        self._warm = 0
        self._recorded: _Recorded | None = None
        self._lr = torch.zeros((), dtype=torch.float32, device=run.device)
        self._counters = torch.zeros(8, dtype=torch.int32, device=run.device)

    def scaling(self) -> Scaling:
        return _copy_of(self.run.scaling())  # a recorded step writes into the tensors themselves

    def step(self, recipe: Recipe, rows: Iterable[Rows]) -> Queued:
        """Queue the step that `run.step` is at.

        Raises:
            UserError: the step cannot be recorded. The weights are as they were before it then.
        """
        self._follow(self.run.plan.at(self.run.step))
        if self._recorder is None:
            self._recorder = self._make(self.run.device)
        self._lr.fill_(self.run.optimizer.param_groups[0]["lr"])
        write_step_counters(self._counters, self.run.step)
        if self._recorded is None and self._warm < WARM_UP:
            self._warm += 1
            with self._on_the_device():  # so that the kernels which read these numbers are compiled and loaded
                return self._recorder.warm_up(lambda: self._eager.step(recipe, rows))
        batch = list(rows)
        if self._recorded is None:
            self._recorded = self._record(self._recorder, recipe, batch)
        return self._replay(self._recorded, batch)

    def drop(self) -> None:
        """Forget the graph and free its memory; the next steps warm up for another one."""
        self._recorded = self._recorder = None
        self._warm = 0

    def _follow(self, stretch: PlannedStretch) -> None:
        before, self._of = self._of, stretch
        if before is None or before is stretch:
            return
        if (before.recipe, before.layers) != (stretch.recipe, stretch.layers):
            self.drop()

    def _record(self, recorder: Recorder, recipe: Recipe, batch: list[Rows]) -> _Recorded:
        run = self.run
        inputs = [(tokens.clone(), targets.clone()) for tokens, targets in batch]
        failed_before = torch.zeros((), dtype=torch.bool, device=run.device)
        failed, scaling = run.failed, _copy_of(run.scaling())

        def step() -> tuple[Queued, Tensor]:
            run.failed = failed_before
            queued = self._eager.step(recipe, inputs)
            assert run.failed is not None
            _write(run.scaling(), scaling)
            return queued, run.failed

        # This drops prepared weights, too: an evaluation may have made this step's, which the graph must make itself.
        run.load_scaling(scaling)
        try:
            with self._on_the_device():
                queued, failed_after = recorder.record(step)
        except RuntimeError as error:
            self.drop()
            run.mid_update, run.failed = False, failed  # nothing has run
            if isinstance(error, torch.OutOfMemoryError):
                raise
            said = first_line(error).rstrip(".")
            raise UserError(
                f"train.cuda_graph=true: step {run.step} cannot be recorded: {said}. Go on with train.cuda_graph=false"
            ) from error
        run.failed = failed
        run.load_scaling(scaling)  # and prepared weights lie in the graph's memory now
        return _Recorded(recorder, inputs, failed_before, scaling, queued, failed_after)

    @contextmanager
    def _on_the_device(self) -> Iterator[None]:
        """Context in which step and learning rate are read from device memory, and not from the host."""
        groups = self.run.optimizer.param_groups
        before = [{"lr": group["lr"], "capturable": group["capturable"]} for group in groups]
        for group in groups:
            group.update(lr=self._lr, capturable=True)
        self.run.counters = self._counters
        try:
            yield
        finally:
            self.run.counters = None
            for group, values in zip(groups, before, strict=True):
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
        if any(recorded.scaling.values()):
            _write(run.scaling(), recorded.scaling)  # what a step outside of the graph has entered
            run.load_scaling(recorded.scaling)
        run.mid_update = True
        recorded.recorder.replay()
        run.failed = recorded.failed
        # The next replay overwrites them, and a step's numbers are read after that.
        return recorded.queued._replace(numbers=recorded.queued.numbers.clone())


def _copy_of(scaling: Scaling) -> Scaling:
    """The same values in memory of their own."""
    return {layer: {name: each.clone() for name, each in state.items()} for layer, state in scaling.items()}


def _write(source: Scaling, target: Scaling) -> None:
    for layer, state in source.items():
        for name, each in state.items():
            if target[layer][name] is not each:
                target[layer][name].copy_(each)


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
        reason = f"steps of {run.world.size} ranks are not recorded: their collectives wait for each other on the host"
    elif run.teacher is not None:
        reason = "a teacher runs beside the model in every microbatch, and its passes are not recorded"
    elif run.train_data.tokens.scored is not None:
        reason = "the loss is divided by the answers of each batch, which the host counts"
    elif config.train.compile:
        reason = "train.compile=true queues blocks in graphs of its own; choose one of the two"
    elif getattr(config.model, "recompute", False):
        reason = (
            "model.recompute=true reads the state of torch's random generator on the host in every block; choose "
            "smaller microbatches instead of recomputation"
        )
    elif not getattr(optimizer, "_step_supports_amp_scaling", False) or not all(
        group.get("fused") and "capturable" in group for group in optimizer.param_groups
    ):
        reason = f"{type(config.optim).__name__} decides on the host; torch's fused optimizers (optim=adamw) do not"
    if reason is not None:
        raise UserError(f"train.cuda_graph=true: {reason}. Or use train.cuda_graph=false")


def check_plan(plan: Plan) -> None:
    """Whether the steps of all stretches can be recorded.

    Raises:
        ValueError: one cannot; the message names recipe, layer and operand.
    """
    for stretch in plan.stretches:
        if reason := why_not(stretch):
            routed = any(each.layer.experts for each in stretch.layers.values())
            other = " whatever the recipe; a model without experts can be recorded" if routed else ", or another recipe"
            raise ValueError(
                f"train.cuda_graph=true cannot record {stretch.title}: {reason}. Use train.cuda_graph=false{other}"
            )


def why_not(stretch: PlannedStretch) -> str | None:
    """Why a step of `stretch` depends on the host; None if it can be recorded."""
    if stretch.recipe.loss_scaling is not None:
        return f"recipe {stretch.recipe.name}: the host sets its loss scale from the gradients of the step before"
    return next(filter(None, map(why_no_graph, stretch.layers.values())), None)
