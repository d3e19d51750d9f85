"""Writing one checkpoint: into a hidden directory, then renamed; by one rank, or by several that agree at each step."""

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from fp4train.checkpoint import layout
from fp4train.checkpoint.layout import CheckpointGroup, opened_folder
from fp4train.checkpoint.tensors import write_parts
from fp4train.checkpoint.tree import JSON, from_strict, merged, to_strict
from fp4train.files import Folder
from fp4train.sealed import sealed
from fp4train.shards import TensorShard, owned, separate


class Writing:
    """The checkpoint of one step, written by all of `ranks` in the same order of steps."""

    def __init__(self, folder: Path | Folder, step: int, ranks: CheckpointGroup) -> None:
        self.folder, self.step, self.ranks = folder, step, ranks
        self.name = layout.directory_name(step)
        self.temporary = f"{layout.LEFTOVER}{self.name}"

    def write(self, tensors: Mapping[str, Tensor] | Mapping[str, TensorShard], state: Mapping[str, JSON]) -> None:
        """Write it; an exception on one rank is raised on all, and leaves no directory."""
        try:
            begun = self._together(self._begin)
            if set(begun) != {self.step}:
                raise OSError(f"ranks save different steps: {begun}")
            described: list[dict[str, Any]] = self._together(lambda: self._own(tensors, state))
            self._together(lambda: self._end(state, described))
        except BaseException:  # a signal turned into an exception too: leave no half-written directory
            if self.ranks.first:
                with suppress(OSError), opened_folder(self.folder) as opened:
                    opened.remove_folder(self.temporary)
            raise

    def _together(self, task: Callable[[], object]) -> Any:
        """The results of `task` on all ranks, in the order of ranks; it waits for all of them."""
        if self.ranks.size == 1:
            return [task()]
        given, raised = None, None
        try:
            given = task()
        except Exception as error:
            raised = error
        try:
            if problem := self.ranks.agree(None if raised is None else str(raised) or type(raised).__name__):
                raise OSError(problem) from raised
            return self.ranks.gathered(given)
        except RuntimeError as error:
            raise OSError("a rank has ended, or does not answer") from error

    def _begin(self) -> int:
        """The step, so that ranks which save different ones are found."""
        if self.ranks.first:
            with opened_folder(self.folder, create=True) as opened:
                _clean(opened)
                opened.folder(self.temporary, create=True).close()
        return self.step

    def _own(
        self, tensors: Mapping[str, Tensor] | Mapping[str, TensorShard], state: Mapping[str, JSON]
    ) -> dict[str, Any]:
        """Write this rank's file; what it says of the state where it leads a stage of its own."""
        stage = {"state": to_strict(dict(state))} if self.ranks.leads and not self.ranks.first else {}
        parts = {name: each for name, each in tensors.items() if isinstance(each, TensorShard)}
        whole = {name: each for name, each in tensors.items() if isinstance(each, Tensor)}
        parts |= owned(whole, leads=self.ranks.leads)
        stored, aliases = separate({name: part.tensor for name, part in parts.items()})
        if not stored and self.ranks.size > 1:
            return {"aliases": {}, **stage}
        size, several = 0, self.ranks.size > 1
        file = f"tensors-{self.ranks.rank:05d}-of-{self.ranks.size:05d}.safetensors" if several else layout.TENSORS
        with opened_folder(self.folder) as opened, self._shared(opened) as new:
            descriptor = new.descriptor_of(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                size, sha256 = write_parts(descriptor, {name: parts[name] for name in stored})
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return {"file": file, "bytes": size, "sha256": sha256, "aliases": aliases, **stage}

    def _shared(self, opened: Folder) -> Folder:
        try:
            return opened.folder(self.temporary)
        except FileNotFoundError:
            raise OSError(
                errno.ENOENT,
                "the first rank made this folder, and this rank does not see it: is it on a disk that "
                "all machines share?",
                str(opened.path / self.temporary),
            ) from None

    def _end(self, state: Mapping[str, JSON], described: list[dict[str, Any]]) -> None:
        """Describe all files and rename: from here on the checkpoint exists."""
        if not self.ranks.first:
            return
        aliases = {name: target for each in described for name, target in each["aliases"].items()}
        files = {each["file"]: {key: each[key] for key in ("bytes", "sha256")} for each in described if "file" in each}
        union: JSON = dict(state)
        for each in described:
            if "state" in each:
                union = merged(union, from_strict(each["state"]))
        tensors = {"files": files} if self.ranks.size > 1 else files[layout.TENSORS]
        body = {
            "format": layout.FORMAT,
            "version": layout.SHARDED if self.ranks.size > 1 else layout.VERSION,
            "step": self.step,
            "tensors": {**tensors, "aliases": aliases},
            "state": to_strict(union),
        }
        with opened_folder(self.folder) as opened:
            with opened.folder(self.temporary) as new:
                new.write(layout.STATE, sealed(body, indent=1))
            _replace(opened, self.temporary, self.name)


def _replace(folder: Folder, temporary: str, name: str) -> None:
    """Rename into place. Where one of the same step exists, it is set aside first and found again after a kill."""
    aside = layout.REPLACED + name
    if folder.has_folder(name):
        folder.rename(name, aside)
    try:
        folder.rename(temporary, name)
    except OSError:
        if folder.has_folder(aside):
            folder.rename(aside, name)
        raise
    folder.sync()
    with suppress(OSError):
        folder.remove_folder(aside)


def _clean(folder: Folder) -> None:
    """Remove what a killed process left, and put back a checkpoint that was set aside but never replaced."""
    for entry in folder.names():
        if entry.startswith(layout.LEFTOVER):
            with suppress(OSError):
                folder.remove_folder(entry)
        elif entry.startswith(layout.REPLACED):
            name = entry.removeprefix(layout.REPLACED)
            if folder.has_folder(name):
                with suppress(OSError):
                    folder.remove_folder(entry)
            else:
                folder.rename(entry, name)
