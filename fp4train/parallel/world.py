"""The ranks of a run: who leads, the mesh, and the few collectives that the rest of the package
uses.

A world of one is the same object, whose collectives return what they were given: no caller asks how
many ranks there are.

Two kinds of messages. Tensors of the model travel over the device's own backend. Decisions
(numbers, texts) travel over gloo between the CPUs, so that they never wait for a device.
"""

from __future__ import annotations

import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from fp4train.checkpoint import ALONE, WRITE_SECONDS, CheckpointGroup
from fp4train.errors import LostError, UserError, user_errors
from fp4train.nn.ranks import Ranks
from fp4train.parallel.config import Mesh, Parallel
from fp4train.parallel.launch import Meeting, ProcessRank
from fp4train.text import first_line

T = TypeVar("T")

STAGES = "pp"
REPLICATE = "dp_replicate"
SHARD = "dp_shard"
TENSOR = "tp"
EXPERTS = "ep"
"""Names of the mesh's dimensions."""
_BROKEN = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "timed out",
)
"""Texts in messages of a collective that another rank has left."""


class AgreedError(UserError):
    """An error that every rank raises at the same place: the lead tells it, and all can part in
    peace.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """The ranks of one run.

    Args:
        place: which of them this process is.
        device: device of its tensors.
        mesh: how many ranks have which use.
        data_mesh: mesh of the ranks that hold the same part of the model; its dimensions are
            `REPLICATE` and `SHARD`, the chunks of a sequence innermost. None in a world of one.
        data: group of the ranks of `data_mesh`, which have other tokens; None: all ranks.
        tensor: the ranks that share every block's matrices; None: there are none.
        peers: group of the ranks that hold the same stages, or parts of them; None: all ranks.
        context: the ranks that share every sequence; None: there are none.
        expert_grid: all ranks once more, those of one `SHARD` being the ones that hold the same
            experts; None: every rank has all.
        pipeline: group of the ranks that hold the stages of one model, in their order; None without
            a pipeline.
        control: the group of all ranks for decisions.
        meeting: the store in which a rank leaves its last word; None in a world of one.
        timeout: seconds that a collective waits for a rank.
        ranks: all of them, for checkpoints: over a group of their own, because a thread writes
            them.
    """

    place: ProcessRank = field(default_factory=ProcessRank)
    device: torch.device
    mesh: Mesh = field(default_factory=Mesh)
    data_mesh: DeviceMesh | None = None
    data: dist.ProcessGroup | None = None
    tensor: DeviceMesh | None = None
    peers: dist.ProcessGroup | None = None
    context: Ranks | None = None
    expert_grid: DeviceMesh | None = None
    pipeline: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    meeting: Meeting | None = None
    timeout: float = 0.0
    ranks: CheckpointGroup = ALONE

    @classmethod
    def start(cls, place: ProcessRank, parallel: Parallel, device: torch.device) -> World:
        """Meet the other ranks and lay out the mesh.

        Raises:
            UserError: the mesh does not fit the ranks, or the others cannot be reached in time.
        """
        with user_errors(ValueError):
            mesh = parallel.mesh(place.size)
        if place.size == 1:
            return cls(place=place, device=device, mesh=mesh)
        timeout = timedelta(seconds=parallel.timeout)
        cuda = device.type == "cuda"
        meeting = Meeting.join(place, parallel.timeout)
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=meeting.store,
                rank=place.rank,
                world_size=place.size,
                timeout=timeout,
                device_id=device if cuda else None,
            )
            sizes = (mesh.pipeline, mesh.replicate, mesh.weight_ranks, mesh.tensor)
            grid = init_device_mesh(
                device.type, sizes, mesh_dim_names=(STAGES, REPLICATE, SHARD, TENSOR)
            )
            expert_grid = _expert_grid(device, mesh)
            # groups of a mesh have torch's own timeout: 10 minutes with NCCL, 30 with gloo; torch
            # has no public call that changes it
            for own_grid in filter(None, (grid, expert_grid)):
                for group in own_grid.get_all_groups():
                    _set_pg_timeout(timeout, group)
            cut_groups = _cut_groups(grid, mesh, timeout)
            if cuda:
                control = dist.new_group(backend="gloo", timeout=timeout)
            else:
                control = dist.group.WORLD
            # Of the ranks that hold the same stages the first one writes what all of them hold.
            leads = place.rank % (mesh.token_ranks * mesh.tensor) == 0
            # a thread that writes waits for slow disks; the loop finds ranks that hang
            patient = max(timeout, timedelta(seconds=WRITE_SECONDS))
            ranks = CheckpointGroup(dist.new_group(backend="gloo", timeout=patient), leads=leads)
        except (RuntimeError, dist.DistError) as error:
            text = (
                f"rank {place.rank} of {place.size} does not connect to the others within "
                f"parallel.timeout={parallel.timeout:g} s: {first_line(error)}"
            )
            raise LostError(text, speaks=meeting.announce(LostError.exit_code, text)) from error
        return cls(
            place=place,
            device=device,
            mesh=mesh,
            data_mesh=grid[REPLICATE, SHARD],
            expert_grid=expert_grid,
            control=control,
            meeting=meeting,
            timeout=parallel.timeout,
            ranks=ranks,
            **cut_groups,
        )

    # -- who ---------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def lead(self) -> bool:
        """Whether this rank alone writes, logs, and is asked."""
        return self.place.lead

    @property
    def token_rank(self) -> int:
        """Index of this rank's tokens among those of a batch: chunks, then parts of it."""
        if self.data_mesh is None:
            return 0
        replica = self.data_mesh.get_local_rank(REPLICATE)
        return replica * self.mesh.weight_ranks + self.data_mesh.get_local_rank(SHARD)

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of a batch."""
        return self.token_rank // self.mesh.context

    @property
    def chunk(self) -> int:
        """Index of this rank's chunk of every sequence."""
        return self.token_rank % self.mesh.context

    @property
    def experts(self) -> DeviceMesh | None:
        """The ranks that share the experts of every layer; None: there are none."""
        return self.expert_grid and self.expert_grid[EXPERTS]

    @property
    def expert_data(self) -> DeviceMesh | None:
        """`data_mesh` of the ranks that hold the same experts."""
        return self.expert_grid and self.expert_grid[REPLICATE, SHARD]

    @property
    def stage(self) -> int:
        """Index of this rank among those that the blocks of one model are cut over."""
        if self.pipeline is None:
            return 0
        return self.pipeline.rank()

    def __str__(self) -> str:
        mesh = self.mesh
        if self.size == 1:
            return "1 rank"
        cut = f"{mesh.shard} shards" + (
            f" × {mesh.replicate} replicas" if mesh.replicate > 1 else ""
        )
        for ranks, what in (
            (mesh.context, "context-parallel"),
            (mesh.tensor, "tensor-parallel"),
            (mesh.pipeline, "stages"),
        ):
            if ranks > 1:
                cut = f"{ranks} {what}" + (f" × {cut}" if mesh.data > 1 else "")
        if mesh.expert > 1:
            cut += f", {mesh.expert} of which share experts"
        return f"{self.size} ranks ({cut})"

    # -- tensors -----------------------------------------------------------------------------------

    def own_chunk(self, x_BT: Tensor) -> Tensor:
        """This rank's part of whole sequences [B, T]: [B, T / n], where n ranks share each."""
        if self.mesh.context == 1:
            return x_BT
        return x_BT.chunk(self.mesh.context, 1)[self.chunk].contiguous()

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over all data ranks of what the last stage found, in place; other stages give
        zeros.
        """
        self.summed_over_data(tensor)
        if self.mesh.pipeline > 1:
            dist.all_reduce(tensor, group=self.pipeline)
        return tensor

    def summed_over_data(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the same layers and have other tokens, in place."""
        if self.mesh.token_ranks > 1:
            dist.all_reduce(tensor, group=self.data)
        return tensor

    def summed_over_shards(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the parts of the same weights, in place."""
        if self.data_mesh is not None and self.mesh.weight_ranks > 1:
            dist.all_reduce(tensor, group=self.data_mesh.get_group(SHARD))
        return tensor

    def summed_over_parts(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold the parts of one model, in place."""
        self.summed_over_shards(tensor)
        if self.tensor is not None:
            dist.all_reduce(tensor, group=self.tensor.get_group())
        if self.mesh.pipeline > 1:
            dist.all_reduce(tensor, group=self.pipeline)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """The maximum over all ranks that hold the same layers, or parts of them, element by
        element, in place.
        """
        if self.mesh.token_ranks * self.mesh.tensor > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.peers)
        return tensor

    # -- decisions ---------------------------------------------------------------------------------

    def largest_numbers(self, *numbers: int) -> tuple[int, ...]:
        """The largest value that any rank gave, for each number."""
        if self.size == 1:
            return numbers
        largest = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control)
        return tuple(largest.tolist())

    def everywhere(self, holds: bool) -> bool:
        """Whether `holds` on every rank."""
        return not self.largest_numbers(int(not holds))[0]

    def broadcast(self, value: T) -> T:
        """The lead's `value` (plain data), on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value if self.lead else None]
        dist.broadcast_object_list(box, src=0, group=self.control)
        value_of_lead: T = box[0]
        return value_of_lead

    def gathered(self, value: T) -> list[T]:
        """The `value` (plain data) of every rank, by rank."""
        return CheckpointGroup(self.control).gathered(value)

    def first(self, value: T | None) -> T | None:
        """The `value` (plain data) of the first rank that has one."""
        return next(
            (candidate for candidate in self.gathered(value) if candidate is not None), None
        )

    def least(self, value: T | None, key: Callable[[T], Any]) -> T | None:
        """The value with the least `key` among those of all ranks (plain data); None where no rank
        has one.
        """
        return min(
            (candidate for candidate in self.gathered(value) if candidate is not None),
            key=key,
            default=None,
        )

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.control)

    @contextmanager
    def same_outcome(self) -> Iterator[None]:
        """Context of work that every rank does at once: if it fails on one, it has failed on all.

        Raises:
            AgreedError: on every rank, with the text of the first rank whose error it was.
        """
        if self.size == 1:
            yield
            return
        problem: str | None = None
        own_error: Exception | None = None
        try:
            yield
        except UserError as error:
            problem = str(error)
            own_error = error
        except OSError as error:
            problem = f"{error.filename or 'a file'}: {error.strerror or error}"
            own_error = error
        if self.everywhere(problem is None):
            return
        rank, text = next(
            (rank, text) for rank, text in enumerate(self.gathered(problem)) if text is not None
        )
        raise AgreedError(text if rank == 0 else f"rank {rank}: {text}") from own_error

    def by_machine(self, make: Callable[[], T]) -> T:
        """`make()` on the lead, then on one rank of each other machine, then on the rest: the first
        fill the caches.
        """
        mine = 0 if self.lead else 1 if self.place.local_rank == 0 else 2
        for turn in range(3):
            with self.same_outcome(), self.met_after():
                if turn == mine:
                    outcome = make()
            if self.size == 1:
                break
        return outcome

    @contextmanager
    def met_after(self) -> Iterator[None]:
        """Context of work that may take any time: behind it ranks wait for each other at the store,
        for as long as all of them give signs, and in no collective.
        """
        try:
            yield
        finally:
            if self.meeting is not None:
                self.meeting.wait_for_all(self.timeout)

    # -- the end -----------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank at once, and so the job: the others may be in a collective that this one
        will never join.

        The first rank that fails says so. What others then see, a collective that breaks, follows
        from it and is not told, unless no rank gave a word: then one was killed, or hangs.
        """
        assert self.meeting is not None
        who = f"rank {self.place.rank} on {socket.gethostname()}"
        message = (str(error).strip().splitlines() or [""])[0]
        unexpected = not isinstance(error, UserError)
        if isinstance(error, UserError):
            code = error.exit_code
            word = f"{who} ended: {message}"
        else:
            code = 1
            word = f"{who} ended: {type(error).__name__}: {message}"
        if is_broken(error):
            lost = self.meeting.lost()
            unexpected = False
            code = LostError.exit_code
            if lost is None:
                self.meeting.leave(self.meeting.code)
            late = (
                f"did not answer within parallel.timeout={self.timeout:g} s (it hangs? "
                "train.step_timeout shows where)"
            )
            if "imed out" in str(error):
                why = late
            else:
                why = "ended without a word (killed, or out of memory?)"
            word = f"{who} lost {f'{lost}, which {why}' if lost else 'its connection'}: {message}"
        if self.meeting.announce(code, word):
            if unexpected:
                traceback.print_exception(error)
            print(f"fp4train: {word}", file=sys.stderr)
        self.meeting.leave(self.meeting.code or code)

    def end(self, code: int) -> int:
        """Part from the other ranks; returns `code` in a world of one, ends the process with it
        elsewhere.

        gloo's threads may abort a process that ends by itself ("terminate called without an active
        exception").
        """
        if self.size > 1:
            with suppress(Exception):
                dist.barrier(group=self.control)
            with suppress(Exception):
                dist.destroy_process_group()
            if self.meeting is not None:
                self.meeting.leave(code)
        return code


def is_broken(error: BaseException) -> bool:
    """Whether a collective failed because another rank has left it."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _BROKEN)


def _expert_grid(device: torch.device, mesh: Mesh) -> DeviceMesh | None:
    """See `World`; every rank must ask for it."""
    if mesh.expert == 1:
        return None
    sizes = (mesh.pipeline, mesh.replicate, mesh.expert_holders, mesh.expert)
    return init_device_mesh(device.type, sizes, mesh_dim_names=(STAGES, REPLICATE, SHARD, EXPERTS))


def _cut_groups(grid: DeviceMesh, mesh: Mesh, timeout: timedelta) -> dict[str, Any]:
    """The groups of a model that is cut, by their names in `World`; every rank must ask for them."""
    pipeline = grid.get_group(STAGES) if mesh.pipeline > 1 else None
    tensor = grid[TENSOR] if mesh.tensor > 1 else None
    data = peers = context = None
    if mesh.context > 1:
        chunks = grid.mesh.view(-1, mesh.context, mesh.tensor).transpose(1, 2).flatten(0, 1)
        group = _own_group(chunks, timeout)
        context = Ranks(group=group, rank=group.rank(), size=group.size())
    if pipeline is not None or tensor is not None:
        data = _group_along(grid, (REPLICATE, SHARD), timeout)
    if pipeline is not None:
        peers = data
        if tensor is not None:
            peers = _group_along(grid, (REPLICATE, SHARD, TENSOR), timeout)
    groups = {"pipeline": pipeline, "tensor": tensor, "data": data, "peers": peers}
    return {**groups, "context": context}


def _group_along(
    mesh: DeviceMesh, dimensions: tuple[str, ...], timeout: timedelta
) -> dist.ProcessGroup:
    """The ranks that differ from this one along `dimensions` of the mesh alone; every rank must ask
    for it.
    """
    names = mesh.mesh_dim_names or ()
    along = [names.index(name) for name in dimensions]
    other_axes = [axis for axis in range(len(names)) if axis not in along]
    table = (
        mesh.mesh.permute(*other_axes, *along)
        .flatten(len(other_axes))
        .flatten(0, len(other_axes) - 1)
    )
    return _own_group(table, timeout)


def _own_group(ranks_of_groups: Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """The group of this rank, of a table with a row for each; every rank must ask for it."""
    table = ranks_of_groups.tolist()
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, timeout=timeout) for ranks in table]
    return next(
        group for group, ranks in zip(groups, table, strict=True) if dist.get_rank() in ranks
    )
