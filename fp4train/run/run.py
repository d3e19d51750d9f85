"""A run that is ready to train: model, data, plan, optimizer, and the step that it has reached."""

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4train import checkpoint
from fp4train.audits.bits import bit_sum
from fp4train.config import Config
from fp4train.config.binding import bind
from fp4train.data.loader import RunRows
from fp4train.errors import UserError
from fp4train.formats import BF16
from fp4train.hardware import detect, peak_flops
from fp4train.nn.planned import PlannedLayer
from fp4train.parallel.held import Inventory, modules_in_order
from fp4train.parallel.pipeline import Pipeline
from fp4train.parallel.world import World
from fp4train.precision.layers import Layer, find_blocks, find_layers
from fp4train.precision.plan import PlannedStretch
from fp4train.precision.report import gathers
from fp4train.run.moments import Companions
from fp4train.run.queued import StepRunner
from fp4train.run.record.journal import swaps
from fp4train.run.record.run_record import RunRecord
from fp4train.run.state.base import LossScale, PlainState, RunState, orders_of, saved_part
from fp4train.run.state.moments import Moments
from fp4train.run.state.numbers import DataPlace
from fp4train.run.supervise.checkpoints import Checkpoints
from fp4train.run.supervise.loss_history import LEAST_VOCABULARY, Divergence
from fp4train.run.teacher import Teacher
from fp4train.run.timeline import Course
from fp4train.shards import RowOrder
from fp4train.text import counted, first_line

_log = logging.getLogger(__name__)

STAGES = "data_stages"
VOCABULARY = "vocabulary"
BEGUN = "data_begun"
"""Keys of a checkpoint's state."""


def data_begun(saved: checkpoint.Checkpoint) -> int:
    """The first batch of the data that a checkpoint was trained on; see `RunRows`."""
    begun: int = bind(saved.state.get(BEGUN, 0), int, BEGUN)
    return begun


@dataclass
class Run:
    """A run ready to train; `step` is the number of optimizer steps done.

    Args:
        model: the model; in a pipeline the part of it that this rank holds.
        data: the rows that it learns and is evaluated on.
        course: the recipes and the plan of its steps.
        record: the run's record of itself; empty until it begins.
        built_groups: values of the optimizer's groups of parameters as it was built
            (`state.moments.group_values`).
        multiplied: forward multiplications per token of the whole model
            (`models.common.cut.multiplied`).
        mid_update: the weights are being updated; an exception now leaves them between two steps.
        signal: number of the signal that asked this rank to end; None: none came.
        failed: bool [] on the device: a step whose numbers are not read yet was not finite and
            changed no weight; the ones after it change none either. A loss scale reads it before
            the next step, which goes on. None: all that were read were good.
        pipeline: the stages of the model; None: it is whole.
        teacher: whose distribution it learns; None: the targets alone.
        world: the ranks that train it. Only the lead's record and checkpoints are written.

    Attributes:
        states: states that the run keeps from step to step (`run/states.py`).
        saver: writes checkpoints.
        runner: queues steps.
        companions: hear of the steps (`run/companions.py`).
    """

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: RunRows
    course: Course
    record: RunRecord
    built_groups: list[dict[str, Any]]
    multiplied: int
    step: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)
    mid_update: bool = False
    signal: int | None = None
    failed: torch.Tensor | None = None
    pipeline: Pipeline | None = None
    teacher: Teacher | None = None
    world: World = field(default_factory=lambda: World(device=torch.device("cpu")))
    states: list[RunState] = field(init=False)
    saver: Checkpoints = field(init=False)
    runner: StepRunner = field(init=False)
    companions: Companions = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = self.data.training.vocab_size
        compares = not self.teacher and vocabulary >= LEAST_VOCABULARY
        self.divergence = Divergence(uniform=math.log(vocabulary) if compares else 0.0)

    @property
    def directory(self) -> Path:
        """The run's directory, by its path; `record.folder` is the folder, wherever it is moved."""
        return self.config.run.dir

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def rank_rows(self) -> int:
        """Sequences of a batch that are this rank's."""
        return self.config.train.batch_size // self.world.mesh.data

    @property
    def microbatch_rows(self) -> int:
        """Sequences of a microbatch."""
        return self.config.train.rows(self.world.mesh.data)

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch that are this rank's."""
        return self.microbatch_rows * self.config.train.seq_len // self.world.mesh.context

    @property
    def batch_index(self) -> int:
        """The place in the data of the batch of the current step: that of the step since the data
        began, and what was skipped before.
        """
        return self.batch_of(self.step)

    def batch_of(self, step: int) -> int:
        """As `batch_index`, of a step."""
        return step + self.divergence.skipped(step) - self.data.begun

    def drawn(self) -> dict[str, list[float]]:
        """`Stream.drawn` of training, before the current batch."""
        training = self.data.training
        return training.drawn(self.batch_index * training.batch_size)

    def _stages(self) -> list[list[Any]]:
        """The first batch of each stage of the data, and the shares of the parts."""
        training = self.data.training
        stages = getattr(training, "stages", ())
        return [[first // training.batch_size, list(shares)] for first, shares in stages]

    def shares(self, step: int) -> dict[str, float]:
        """The shares of the parts of a mixture in the batch of a step, or in their first one."""
        training = self.data.training
        first = max(self.batch_of(step), 0) * training.batch_size
        return {name: share for name, (share, _) in training.drawn(first + 1).items()}

    def begins_stage(self, step: int) -> bool:
        """Whether a step has other shares of the data than the one before it."""
        return self.shares(step) != self.shares(step - 1)

    @property
    def description(self) -> str:
        """Model, batch and device in a line."""
        cut = self.pipeline
        if cut is None:
            count = sum(p.numel() for p in self.model.parameters())
        else:
            count = cut.inventory.parameters
        if count >= 1e9:
            size = f"{count / 1e9:.3g} B"
        else:
            size = f"{count / 1e6:.3g} M"
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        else:
            device = str(self.device)
        train = self.config.train
        passes = self.data.training.passes(train.steps - self.data.begun)
        return (
            f"{type(self.config.model).__name__}, {size} parameters; "
            f"{counted(train.steps, 'step')} of {counted(train.step_tokens, 'token')}; "
            + (f"{passes}; " if passes else "")
            + device
            + (f"; {self.world}" if self.world.size > 1 else "")
        )

    def gathers(self) -> list[str]:
        """Forms in which ranks send each other weights, in words; empty where no rank shares
        them.
        """
        shards = self.world.mesh.weight_ranks
        config = self.config
        if shards == 1:
            return []
        blocks = find_blocks(self.model) != [self.model]
        layers = (
            layer for stretch in self.course.plan.stretches for layer in stretch.layers.values()
        )
        return [
            gathers(
                layers,
                shards,
                config.parallel.gather,
                fully_gathered=config.train.whole_weights,
                blocks=blocks,
            )
        ]

    def apply(self, stretch: PlannedStretch) -> None:
        """Give every layer what the plan says that it runs in `stretch`."""
        self.course.apply(stretch, self.planned_layers, self.config.policy, self.device)

    def region(self) -> AbstractContextManager[object]:
        """`Course.region` of this run's ranks."""
        return self.course.region(self.world.peers)

    @property
    def inventory(self) -> Inventory | None:
        """Names of the whole model, where this rank holds some stages of it."""
        if self.pipeline is None:
            return None
        return self.pipeline.inventory

    @property
    def layers(self) -> Mapping[str, Layer]:
        """The linear layers of the whole model, by name."""
        if self.pipeline is None:
            return find_layers(self.model)
        return self.pipeline.inventory.layers

    def place_of(self, module: str) -> int:
        """The place of a module in the forward pass of the whole model; of another name, after all
        of them.
        """
        if self.pipeline is None:
            order = modules_in_order(self.model)
        else:
            order = self.pipeline.inventory.modules
        if module in order:
            return order.index(module)
        return len(order)

    @cached_property
    def planned_layers(self) -> list[PlannedLayer]:
        """The converted layers that this rank holds."""
        return [m for m in self.model.modules() if isinstance(m, PlannedLayer)]

    def peak_tokens_per_s(self) -> float | None:
        """Tokens per second if the GPU did nothing but this model's products at its BF16 peak; None
        if unknown.

        The denominator of the model FLOP/s utilisation (arXiv:2204.02311), with BF16's peak for
        every recipe, so that recipes compare; 6 FLOP per token and forward multiplication, as a
        plan counts them; recomputation not counted.
        """
        if self.device.type == "cuda":
            gpu = detect(torch.cuda.get_device_name(self.device))
        else:
            gpu = None
        if gpu is None:
            return None
        return peak_flops(gpu, BF16.rate) / (6 * self.multiplied)

    def scaling(self) -> dict[str, dict[str, torch.Tensor]]:
        """States of delayed scaling, by layer; empty dicts without it."""
        return {m.layer.name: m.scaling_state() for m in self.planned_layers}

    def load_scaling(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over what `scaling` gave."""
        for module in self.planned_layers:
            module.load_scaling_state(state.get(module.layer.name, {}))

    def state(self) -> dict[str, Any]:
        """Everything that the future of the run depends on, and what it was trained with; of a
        pipeline the share of this rank's stages.
        """
        first_stage = not self.world.stage
        states = {
            state.key: state.saved()
            for state in self.states
            if first_stage or not isinstance(state, PlainState)
        }
        if not first_stage:
            return states
        journal = self.record.journal
        return {
            **states,
            BEGUN: self.data.begun,
            STAGES: self._stages(),
            VOCABULARY: self.data.training.vocab_size,
            "data": self.data.fingerprint,
            "run": {"id": journal.identity},
            "history": journal.last,
            "swaps": swaps(journal.records),
            **({} if self.teacher is None else {"teacher": self.teacher.fingerprint}),
        }

    def must_be_finite(self, path: str) -> bool:
        """Whether a checkpoint is worthless if the tensor of this path in `state` is not finite."""
        key, _, below = path.partition("/")
        return any(state.must_be_finite(below) for state in self.states if state.key == key)

    def row_orders(self) -> dict[str, RowOrder]:
        """The orders of rows in `state`, where tensor parallelism cuts weights in segments."""
        orders: dict[str, RowOrder] = {}
        for state in self.states:
            orders |= orders_of(state.key, self.model)
        return orders

    def _check_bits(self, saved: checkpoint.Checkpoint) -> None:
        """Compare the state with the sums that it had when it was saved; ranks hold parts, of which
        no sums are saved.

        Raises:
            UserError: a tensor has other bits, or a moment is lost.
        """
        sums = saved.state.get(checkpoint.SUMS)
        if self.world.size > 1 or not isinstance(sums, dict):
            return
        tensors, _ = checkpoint.flatten({state.key: state.saved() for state in self.states})
        for name, total in sums.items():
            tensor = tensors.get(name)
            if tensor is None:
                changed = name.startswith(f"{Moments.key}/")
            else:
                alike = name in saved.tensors and saved.tensors.dtype(name) == tensor.dtype
                changed = alike and int(bit_sum(tensor)) != total
            if changed:
                raise UserError(
                    f"{saved.path}: {name} has other bits than it had in the run: memory is "
                    "failing, or a disk. Try again, or go on from an older one (resume_step=…)"
                )

    def restore(self, saved: checkpoint.Checkpoint, *, other_data: bool = False) -> None:
        """Go on from a checkpoint.

        Args:
            other_data: whether the run goes on with other data than it was trained on.

        Raises:
            UserError: a tensor of it does not fit, is not finite, or has other bits than were
                saved, or it was trained on other data or by another teacher.
        """
        self.step = saved.step  # states are checked and loaded for it
        states = [s for s in self.states if not (other_data and isinstance(s, DataPlace))]
        try:
            tables = [saved_part(saved, state.key, self.model, self.inventory) for state in states]
            for state, table in zip(states, tables, strict=True):
                state.check(table)
            for state, table in zip(states, tables, strict=True):
                state.load(table)
            if other_data:
                self.divergence = self.divergence.anew()
            data = saved.state["data"]
        except (
            LookupError,
            TypeError,
            ValueError,
            OSError,
            RuntimeError,
            AttributeError,
            RecursionError,
        ) as error:
            reason = first_line(error) + (" is missing" if isinstance(error, LookupError) else "")
            ids = "; other data need the token ids of the run's own" if other_data else ""
            raise UserError(f"{saved.path} does not fit this model: {reason}{ids}") from error
        self._check_data(saved, data, other_data)
        self._check_bits(saved)
        if self.teacher is None:
            teacher = None
        else:
            teacher = self.teacher.fingerprint
        if saved.state.get("teacher", teacher) != teacher and teacher is not None:
            raise UserError(
                f"{saved.path} was trained with a teacher of other weights than "
                f"teacher={self.config.teacher} has: "
                "name the weights that the run began with (teacher=FOLDER, or of a run "
                "teacher_step=STEP)"
            )

    def _check_data(
        self, saved: checkpoint.Checkpoint, fingerprint: object, other_data: bool
    ) -> None:
        """The data, their vocabulary and stages are those that the checkpoint was trained on."""
        if fingerprint != self.data.fingerprint and not other_data:
            raise UserError(
                f"{saved.path} was trained on other data (fingerprint {fingerprint}, now "
                f"{self.data.fingerprint}): "
                "give the run the data that it began with, or go on with others as a branch "
                "(run.name=NEW data=…)"
            )
        size = self.data.training.vocab_size
        if saved.state.get(VOCABULARY, size) != size:
            raise UserError(
                f"{saved.path} was trained on {saved.state[VOCABULARY]} token ids, and these data "
                f"have {size}: other data need the token ids of the run's own"
            )
        stages = self._stages()
        saved_stages: Any = stages if other_data else saved.state.get(STAGES, stages)
        at = self.batch_index
        if [stage for stage in saved_stages if stage[0] < at] != [s for s in stages if s[0] < at]:
            raise UserError(
                f"{saved.path} was trained in other stages than data.stages has before step "
                f"{saved.step}: leave those as they were, and change what begins later (a start "
                "that is a share of the run is another step where train.steps changes: name the "
                "step)"
            )
        if (now := [stage[0] for stage in stages]) != (
            then := [stage[0] for stage in saved_stages]
        ):
            _log.warning("data.stages begin at batches %s from here on, not %s", now, then)
