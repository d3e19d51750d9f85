"""Sums of the bits of a run's state: weights, moments, and what else a checkpoint holds.

The state after an update must be the state before the next step, whatever evaluations and
checkpoints did between, and the state directly before the update: memory that changes by itself, or
code that writes where it should not, changes the sum of a tensor. Left out in the passes are the
states of layers, which follow their tokens, and a module of which torch's operations write a tensor,
as running means. Ranks that hold copies of a tensor must have the same sums. An update at a rate
above zero must change some weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp4train import checkpoint
from fp4train.audits.bits import bit_sum
from fp4train.audits.fault import Fault
from fp4train.checkpoint.layout import MODEL
from fp4train.optim.repeated import UPDATES, WEIGHT, rounding_of
from fp4train.parallel.tensor import replicas
from fp4train.parallel.world import REPLICATE
from fp4train.run.queued import Step, due
from fp4train.run.state.layers import LayerStates
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
    """The sums of all tensors of a run's state, and of buffers that no checkpoint holds; of tied
    weights under one of their names.
    """
    return sums_of(_stored(run))


def _stored(run: Run) -> dict[str, Tensor]:
    """This rank's parts of the tensors of a run's state, of tied ones one, and all buffers."""
    tensors, _ = checkpoint.flatten(run.state())
    for name, buffer in run.model.named_buffers():
        tensors.setdefault(f"{MODEL}/{checkpoint.escaped(name)}", buffer)
    stored, _ = separate({name: local(tensor) for name, tensor in tensors.items()})
    return stored


Versions = dict[str, tuple[torch.UntypedStorage, int]]
"""Path of a weight or buffer → its memory, and the number of times that torch has written it."""


def _versions(model: nn.Module) -> Versions:
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {
        f"{MODEL}/{checkpoint.escaped(name)}": (local(tensor).untyped_storage(), tensor._version)
        for name, tensor in tensors
    }


def _written(model: nn.Module, since: Versions) -> set[str]:
    """The paths of weights and buffers that torch has written, or that are others, since then."""
    now = _versions(model)
    return {path for path in now.keys() | since.keys() if now.get(path) != since.get(path)}


def _module(path: str) -> str:
    """The path of the module that has a tensor."""
    return path.rpartition(".")[0]


_OF_LAYERS: Final = f"{LayerStates.key}/"
"""States of layers, which follow their tokens; another recipe has others."""
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
        self._in_passes: list[Fault] = []
        self._updated: Versions = {}
        self.count = 0
        if self.every:  # before the hooks of users
            run.optimizer.register_step_post_hook(self._after_update)

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
        self._forget_buffers()
        return self._after

    def before_step(self) -> list[Fault]:
        """The tensors that changed since the last update; sums the state before one that is summed
        after it.
        """
        due_now = self.due(self.run.step)
        sums = self._sums() if due_now or self._after is not None else None
        faults = self._since_update(sums)
        self._before = sums if due_now else None
        return faults

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A context of a step; where the state before it was summed, it is summed again directly
        before the update.
        """
        self._updated = {}
        if self._before is None or self.run.config.train.cuda_graph:
            yield
            return
        versions = _versions(self.run.model)
        hook = self.run.optimizer.register_step_pre_hook(lambda *_: self._before_update(versions))
        try:
            yield
        finally:
            hook.remove()

    def _after_update(self, *_: object) -> None:
        if self._before is not None:
            self._updated = _versions(self.run.model)

    def _before_update(self, versions: Versions) -> None:
        """Note the tensors that changed in the passes of a step."""
        with self.failures.guarding(STATE):
            written = {_module(path) for path in _written(self.run.model, versions)}
            sums = state_sums(self.run)
            before = {
                name: total
                for name, total in (self._before or {}).items()
                if _module(name) not in written and not name.startswith(_OF_LAYERS)
            }
            self._in_passes = self._changed(before, sums, "in the passes of the step")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context of code that may write the state: what it writes is not compared until the next
        update.
        """
        before = self._sums() if self._after else None
        try:
            yield
        finally:
            if self._after and before:
                for name, _ in before.items() - (self._sums() or before).items():
                    self._after.pop(name, None)

    def at_end(self) -> list[Fault]:
        """The tensors that changed since the last update, where no step follows."""
        if self._after is None:
            return []
        return self._since_update(self._sums())

    def after_step(self, step: Step) -> list[Fault]:
        """Sum the state after an update; what it should have changed, and copies that differ."""
        if not self.due(step.index):
            return []
        sums = self._after = self._sums()
        self._summed = step.index + 1
        before, self._before = self._before, None
        on_all_ranks = self.run.world.everywhere(sums is not None)
        faults = self._in_passes
        self._in_passes = []
        if sums is None:
            return faults
        with self.failures.guarding(STATE):
            if type(self.run.config.optim) in UPDATES:
                faults += [*self._other_rate(step), *self._unchanged(before, sums, step)]
        self._updated = self._updated or _versions(self.run.model)
        return [*faults, *self._copies_that_differ(sums)] if on_all_ranks else faults

    def _sums(self) -> BitSums | None:
        sums = None
        with self.failures.guarding(STATE):
            sums = state_sums(self.run)
        return sums

    def _since_update(self, sums: BitSums | None) -> list[Fault]:
        if self._after is None:
            return []
        self._forget_buffers()
        faults = self._changed(self._after, sums, "between the update and the next step")
        self.count += sums is not None
        self._after = None
        return faults

    def _forget_buffers(self) -> None:
        """Forget the sums of buffers that torch has written since the update, as evaluations may."""
        model = self.run.model
        weights = {f"{MODEL}/{checkpoint.escaped(name)}" for name, _ in model.named_parameters()}
        for path in _written(model, self._updated) - weights:
            (self._after or {}).pop(path, None)

    def _changed(self, before: BitSums | None, sums: BitSums | None, when: str) -> list[Fault]:
        if before is None or sums is None:
            return []
        return [
            Fault(layer=name, what=f"its bits changed {when}")
            for name, total in before.items()
            if sums.get(name, total if name.startswith(_OF_LAYERS) else None) != total
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
        """The weights with a gradient that the update did not change, nor a hook on the optimizer."""
        rate = step.values["train/lr"]
        failed = self.run.failed is not None and bool(self.run.failed)
        if before is None or failed or not isinstance(rate, float) or not rate:
            return []
        parameters = dict(self.run.model.named_parameters())
        learning = {
            f"{MODEL}/{checkpoint.escaped(name)}": parameters[name]
            for name, norm in zip(step.names, step.numbers.read()[2:], strict=True)
            if norm > 0
        }
        by_hooks = _written(self.run.model, self._updated) if self._updated else set()
        still = [
            path
            for path in learning
            if path in after and path not in by_hooks and before.get(path) == after[path]
        ]
        unchanged = [path for path in still if self._would_move(learning[path], rate)]
        if len(unchanged) == len(learning) > 0:
            what = f"the update at a rate of {rate:.3g} changed no weight"
            return [Fault(layer="the optimizer", what=what)]
        what = f"it has a gradient, and the update at a rate of {rate:.3g} did not change it"
        return [Fault(layer=path, what=what) for path in unchanged]

    def _would_move(self, parameter: Tensor, rate: float) -> bool:
        """Whether another update without a gradient would change a weight: by more than its
        dtype rounds away. One without moments, or whose moments are zero, was never updated, where others
        have some.
        """
        states = self.run.optimizer.state
        state = states.get(parameter, {})
        before = {name: local(tensor).double() for name, tensor in state.items()}
        if not any(tensor.any() for name, tensor in before.items() if name != "step"):
            return bool(states)
        before[WEIGHT] = local(parameter.detach()).double()
        still = torch.zeros_like(before[WEIGHT])
        optim = self.run.config.optim
        after = UPDATES[type(optim)](optim, before, still, rate, 0.0)
        moved = (after.get(WEIGHT, before[WEIGHT]) - before[WEIGHT]).abs()
        return bool((moved > rounding_of(parameter) * before[WEIGHT].abs()).any())

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
