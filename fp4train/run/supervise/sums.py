"""Sums of the bits of a run's state: weights, moments, and what else a checkpoint holds.

The state after an update must be the state before the next step, whatever evaluations and
checkpoints did between: memory that changes by itself, or code that writes where it should not,
changes the sum of a tensor. Ranks that hold copies of a tensor must have the same sums. An update
at a rate above zero must change some weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fp4train import checkpoint
from fp4train.audit.bits import bit_sum
from fp4train.audit.fault import Fault
from fp4train.checkpoint.layout import MODEL
from fp4train.parallel.tensor import replicas
from fp4train.parallel.world import REPLICATE
from fp4train.run.queued import Step, due
from fp4train.run.supervise.audit_report import AuditFailures
from fp4train.shards import TensorShard, local, separate

if TYPE_CHECKING:
    from fp4train.run.run import Run

BitSums = dict[str, int]
"""Path of a tensor in the state → the sum of the bits of this rank's part of it."""


def sums_of(tensors: Mapping[str, Tensor]) -> BitSums:
    """The sums of tensors of this rank; waits for the device once."""
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        by_device.setdefault(tensor.device, []).append(name)
    sums: BitSums = {}
    for names in by_device.values():
        values = torch.stack([bit_sum(tensors[name]) for name in names]).tolist()
        sums |= dict(zip(names, values, strict=True))
    return {name: sums[name] for name in tensors}


def state_sums(run: Run) -> BitSums:
    """The sums of all tensors of a run's state; of tied weights under one of their names."""
    return sums_of(_stored(run))


def weight_sums(run: Run) -> BitSums:
    """The sums of the weights and buffers alone."""
    stored = _stored(run)
    return sums_of({name: stored[name] for name in stored if name.startswith(f"{MODEL}/")})


def _stored(run: Run) -> dict[str, Tensor]:
    """This rank's parts of the tensors of a run's state, of tied ones one."""
    tensors, _ = checkpoint.flatten(run.state())
    stored, _ = separate({name: local(tensor) for name, tensor in tensors.items()})
    return stored


_RATES: Final = 1e-6
"""Largest difference of two rates, as a share: optimizers may hold one in float32."""
STATE: Final = "the sums of the state"


class StateSums:
    """The sums of a run's state every `audit.sums` steps, of the part that this rank holds.

    Attributes:
        count: updates after which the state was compared with that before the next step.
    """

    def __init__(self, run: Run, failures: AuditFailures) -> None:
        self.run = run
        self.failures = failures
        self.every = run.config.audit.sums
        self._before: BitSums | None = None
        self._after: BitSums | None = None
        self._summed: int | None = None
        self.count = 0

    def due(self, step: int) -> bool:
        """Whether the state after the step of this index is summed: that becomes a checkpoint, too."""
        if not self.every:
            return False
        config = self.run.config
        saved = due(step + 1, config.checkpoint.every, config.train.steps)
        return saved or (step + 1) % self.every == 0

    def of_update(self, step: int) -> BitSums:
        """The sums right after the update that was number `step`; empty: they were not taken."""
        if self._after is None or self._summed != step:
            return {}
        return self._after

    def before_step(self) -> list[Fault]:
        """The tensors that changed since the last update; sums the weights before one that is
        summed after it.
        """
        due_now = self.due(self.run.step)
        if self._after is None:
            self._before = self._sums(weights_alone=True) if due_now else None
            return []
        sums = self._sums()
        faults = self._changed(sums)
        self._after = None
        self._before = sums if due_now else None
        return faults

    def at_end(self) -> list[Fault]:
        """The tensors that changed since the last update, where no step follows."""
        if self._after is None:
            return []
        faults = self._changed(self._sums())
        self._after = None
        return faults

    def after_step(self, step: Step) -> list[Fault]:
        """Sum the state after an update; what it should have changed, and copies that differ."""
        if not self.due(step.index):
            return []
        sums = self._after = self._sums()
        self._summed = step.index + 1
        before, self._before = self._before, None
        on_all_ranks = self.run.world.everywhere(sums is not None)
        if sums is None:
            return []
        faults: list[Fault] = []
        with self.failures.guarding(STATE):
            faults = [*self._other_rate(step), *self._unchanged(before, sums, step)]
        return [*faults, *self._copies_that_differ(sums)] if on_all_ranks else faults

    def _sums(self, *, weights_alone: bool = False) -> BitSums | None:
        take = weight_sums if weights_alone else state_sums
        sums = None
        with self.failures.guarding(STATE):
            sums = take(self.run)
        return sums

    def _changed(self, sums: BitSums | None) -> list[Fault]:
        if self._after is None or sums is None:
            return []
        self.count += 1
        what = "its bits changed between the update and the next step"
        return [
            Fault(layer=name, what=what)
            for name, total in self._after.items()
            if sums.get(name, total) != total
        ]

    def _other_rate(self, step: Step) -> list[Fault]:
        """A rate of the update that is not that of the schedule."""
        planned = step.values.get("train/lr")
        if not isinstance(planned, float):
            return []
        for group in self.run.optimizer.param_groups:
            rate = float(group["lr"])
            if abs(rate - planned) > _RATES * planned:
                what = f"the update had a rate of {rate:.3g}, and the schedule says {planned:.3g}"
                return [Fault(layer="the optimizer", what=what)]
        return []

    def _unchanged(self, before: BitSums | None, after: BitSums, step: Step) -> list[Fault]:
        weights = [f"{MODEL}/{checkpoint.escaped(name)}" for name in step.names]
        weights = [name for name in weights if name in after]
        failed = self.run.failed is not None and bool(self.run.failed)
        rate = step.values.get("train/lr", 0.0)
        if before is None or failed or not weights or not isinstance(rate, float) or not rate:
            return []
        if any(before.get(name) != after[name] for name in weights):
            return []
        what = f"the update at a rate of {rate:.3g} changed no weight"
        return [Fault(layer="the optimizer", what=what)]

    def _copies_that_differ(self, sums: BitSums) -> list[Fault]:
        """Tensors of which ranks hold copies with other bits."""
        world = self.run.world
        if world.size == 1:
            return []
        parameters = dict(self.run.model.named_parameters())
        faults = []
        if world.data_mesh is not None and world.mesh.replicate > 1:
            group = world.data_mesh.get_group(REPLICATE)
            buffers = {
                f"{MODEL}/{checkpoint.escaped(name)}" for name, _ in self.run.model.named_buffers()
            }
            alike = [name for name in sums if name not in buffers]  # these may differ by rank
            faults += _differing(sums, alike, group, world.device, "replicas")
        if world.tensor is not None:
            names = {
                f"{MODEL}/{checkpoint.escaped(name)}"
                for name, parameter in parameters.items()
                if replicas(parameter) > 1
            }
            alike = [name for name in sums if name in names]
            group = world.tensor.get_group()
            faults += _differing(sums, alike, group, world.device, "tensor-parallel copies")
        return faults


def _differing(
    sums: BitSums, names: list[str], group: Any, device: torch.device, kind: str
) -> list[Fault]:
    """The tensors of these names whose sums this rank has otherwise than most ranks of a group. Where
    no sum is that of most ranks, the first rank has the fault, of all.

    Args:
        device: the device whose tensors the group sends: one of NCCL sends no others.
        kind: word for the copies.
    """
    if not names:
        return []
    ranks = dist.get_process_group_ranks(group)
    values = torch.tensor([sums[name] for name in names], device=device)
    gathered = [torch.empty_like(values) for _ in ranks]
    dist.all_gather(gathered, values, group=group)
    apart = (torch.stack(gathered) != gathered[0]).any(dim=0).nonzero().flatten().tolist()
    faults = []
    for at in apart:
        by_rank = [int(rank_values[at]) for rank_values in gathered]
        total, count = Counter(by_rank).most_common(1)[0]
        if 2 * count <= len(ranks):
            if dist.get_rank() == ranks[0]:
                listed = ", ".join(map(str, ranks))
                what = f"its bits differ between the {kind} of ranks {listed}"
                faults.append(Fault(layer=names[at], what=what, rank=None))
        elif sums[names[at]] != total:
            what = f"its bits are not those of the other {kind}"
            faults.append(Fault(layer=names[at], what=what))
    return faults


def same_extent(part: Tensor, tensor: Tensor) -> bool:
    """Whether two tensors are all of the same memory."""
    return len(separate({"part": part, "tensor": tensor})[0]) == 1


def changed_copy(sums: BitSums, copied: Mapping[str, TensorShard]) -> str | None:
    """A sentence about the first copy whose bits are not those of the state; None: all are.

    Args:
        sums: sums of the state; empty: they were not taken.
    """
    for name, total in sums.items():
        if int(bit_sum(copied[name].tensor)) != total:
            return (
                f"The copy of {name} that was to be written has other bits than the state: memory "
                "is failing, or something writes to it. The checkpoint is not written."
            )
    return None
