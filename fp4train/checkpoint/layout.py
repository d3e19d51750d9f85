"""Names and marks of a checkpoint's files, and the group of ranks that write or read it
together.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fp4train import files
from fp4train.errors import in_words
from fp4train.files import Folder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

FORMAT = "fp4train.checkpoint"
VERSION = 3
"""The format version that is written and read."""
WEIGHTS = "weights"
TENSORS = "tensors"
"""Kinds of files: of the weights, and of all tensors that have no kind of their own."""
MODEL = "model"
"""Key of the weights in a state, and the first part of their paths."""
STATE = "state.json"
GOOD = "good"
"""Key in a state of the newest step that is known to be good."""
NAMED = "named"
"""Key in a state of the step that was the good one when the loss last diverged."""
DOUBT = "doubt"
"""Key in a state of the reason why the checkpoint may be useless; a checkpoint without it is in no
doubt.
"""
SUMS = "bit_sums"
"""Key in a state of the sums of bits that its tensors had in the run, by path; under `sums` older
checkpoints have others, which are not compared."""
STATE_LIMIT = 1 << 26
"""Bytes of a state that are read at most; the largest of fp4train's own have some hundred
thousand.
"""

NAME = re.compile(r"step_(\d{8,18})", re.ASCII)
LEFTOVER = ".tmp_"  # being written, or being deleted: worthless after a kill
REPLACED = ".old_"  # a whole checkpoint on its way out while one of the same step takes its place


@contextmanager
def opened_folder(folder: Path | Folder, *, create: bool = False) -> Iterator[Folder]:
    """`folder`, opened if it is a path."""
    if isinstance(folder, Folder):
        yield folder
    else:
        with (
            files.parent(folder, create=create) as (above, name),
            above.folder(name, create=create) as opened,
        ):
            yield opened


def key_of(kind: str) -> str:
    """The key of the state whose tensors files of a `kind` hold; weights apart, it is the kind."""
    return MODEL if kind == WEIGHTS else kind


def kind_of(file: str) -> str:
    """The kind of a file that has a name of `file_name`."""
    return re.split(r"[-.]", file, maxsplit=1)[0]


def file_name(kind: str, rank: int, size: int) -> str:
    """The name of the file of one `kind` that rank number `rank` of `size` writes."""
    if size > 1:
        return f"{kind}-{rank:05d}-of-{size:05d}.safetensors"
    return f"{kind}.safetensors"


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


WRITE_SECONDS = 600.0
"""The longest time that a checkpoint may take; then it is left behind."""


class CheckpointGroup:
    """The ranks of `group`, in its order; None: this process alone, whose collectives do nothing.

    A checkpoint is written in a thread while the training's own group is at work, and two threads
    on one group abort it: checkpoints have a group of their own, of CPUs (gloo).

    Args:
        group: `torch.distributed.new_group(backend="gloo")`, called by all ranks.
        leads: whether this rank writes what several hold alike and no mesh describes; None: the
            first rank does. With a pipeline the first rank of each stage does.

    Attributes:
        waits: whether this rank waits for others in a collective.
    """

    def __init__(self, group: ProcessGroup | None = None, *, leads: bool | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.leads = self.rank == 0 if leads is None else leads
        self.waits = False

    @property
    def first(self) -> bool:
        """Whether this rank is the one that makes, names and removes folders."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """The `value` (plain data) of each rank, in the order of ranks.

        Raises:
            RuntimeError: a rank has ended, or did not come within the group's time.
        """
        if self.group is None:
            return [value]
        from torch.distributed import all_gather_object

        values = [value] * self.size
        self.waits = True
        try:
            all_gather_object(values, value, group=self.group)
        finally:
            self.waits = False
        return values

    def agree(self, problem: str | None) -> str | None:
        """The first rank's problem, named by rank and machine; None where no rank has one."""
        named = problem
        if self.group is not None and problem is not None:
            named = f"rank {self.rank} on {socket.gethostname()}: {problem}"
        return next(
            (rank_problem for rank_problem in self.gathered(named) if rank_problem is not None),
            None,
        )

    def same_outcome(self, task: Callable[[], T]) -> T:
        """Result of `task`, which all ranks do and wait for; where it fails on one, all raise that
        rank's reason.

        Raises:
            OSError: the task failed on a rank.
            RuntimeError: a rank has ended, or did not come within the group's time.
        """
        if self.size == 1:
            return task()
        failure = None
        raised = None
        try:
            result = task()
        except Exception as error:
            raised = error
            failure = in_words(error) or type(error).__name__
        if problem := self.agree(failure):
            raise OSError(problem) from raised
        return result


ALONE = CheckpointGroup()
