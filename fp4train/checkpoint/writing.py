"""Writing one checkpoint: into a hidden directory, then renamed; by one rank, or by several that
agree at each step.
"""

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fp4train.checkpoint import layout
from fp4train.checkpoint.layout import CheckpointGroup, opened_folder
from fp4train.checkpoint.tensors import write_parts
from fp4train.checkpoint.tree import JSON, from_strict, merged, to_strict
from fp4train.files import Folder
from fp4train.sealed import sealed
from fp4train.shards import TensorShard, owned, separate

KINDS = MappingProxyType({layout.MODEL: layout.WEIGHTS})
"""Key of a state → the kind of file of its tensors, where nobody says."""
ENDED = "a rank has ended, or does not answer"


class Writing:
    """The checkpoint of one step, written by all of `ranks` in the same order of steps."""

    def __init__(
        self,
        folder: Path | Folder,
        step: int,
        ranks: CheckpointGroup,
        kinds: Mapping[str, str] = KINDS,
    ) -> None:
        self.folder = folder
        self.step = step
        self.ranks = ranks
        self.kinds = kinds
        self.name = layout.directory_name(step)
        self.temporary = f"{layout.LEFTOVER}{self.name}"

    def write(
        self, tensors: Mapping[str, Tensor] | Mapping[str, TensorShard], state: Mapping[str, JSON]
    ) -> None:
        """Write it; an exception on one rank is raised on all, and leaves no directory."""
        try:
            begun = self.ranks.gathered(self.ranks.same_outcome(self._begin))
            if set(begun) != {self.step}:
                raise OSError(f"ranks save different steps: {begun}")
            described = self.ranks.gathered(
                self.ranks.same_outcome(lambda: self._own(tensors, state))
            )
            self.ranks.same_outcome(lambda: self._end(state, described))
        # a signal turned into an exception too: leave no half-written directory
        except BaseException as error:
            if self.ranks.first:
                with suppress(OSError), opened_folder(self.folder) as opened:
                    opened.remove_folder(self.temporary)
            if self.ranks.size > 1 and isinstance(error, RuntimeError):
                raise OSError(ENDED) from error
            raise

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
        """Write this rank's files; what it says of the state where it leads a stage of its own."""
        described: dict[str, Any] = {"files": {}, "aliases": {}}
        if self.ranks.leads and not self.ranks.first:
            described["state"] = to_strict(dict(state))
        parts: dict[str, TensorShard] = {}
        to_divide: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorShard):
                parts[name] = tensor
            else:
                to_divide[name] = tensor
        parts |= owned(to_divide, leads=self.ranks.leads)
        by_kind: dict[str, list[str]] = {}
        for name in parts:
            kind = self.kinds.get(name.partition("/")[0], layout.TENSORS)
            by_kind.setdefault(kind, []).append(name)
        with opened_folder(self.folder) as opened, self._shared(opened) as new:
            for kind, names in by_kind.items():
                stored, aliases = separate({name: parts[name].tensor for name in names})
                if stored:
                    file = layout.file_name(kind, self.ranks.rank, self.ranks.size)
                    described["files"][file] = self._file(
                        new, file, {name: parts[name] for name in stored}
                    )
                    described["aliases"] |= aliases
        return described

    def _file(self, new: Folder, name: str, parts: Mapping[str, TensorShard]) -> dict[str, Any]:
        descriptor = new.descriptor_of(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            size, sha256 = write_parts(descriptor, parts)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return {"bytes": size, "sha256": sha256}

    def _shared(self, opened: Folder) -> Folder:
        try:
            return opened.folder(self.temporary)
        except FileNotFoundError:
            raise OSError(
                errno.ENOENT,
                "the first rank made this folder, and this rank does not see it: is it on a "
                "disk that all machines share?",
                str(opened.path / self.temporary),
            ) from None

    def _end(self, state: Mapping[str, JSON], described: list[dict[str, Any]]) -> None:
        """Describe all files and rename: from here on the checkpoint exists."""
        if not self.ranks.first:
            return
        aliases = {
            name: target for of_rank in described for name, target in of_rank["aliases"].items()
        }
        files = {name: of_rank["files"][name] for of_rank in described for name in of_rank["files"]}
        union: JSON = dict(state)
        for of_rank in described:
            if "state" in of_rank:
                union = merged(union, from_strict(of_rank["state"]))
        body = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "step": self.step,
            "tensors": {"files": files, "aliases": aliases},
            "state": to_strict(union),
        }
        with opened_folder(self.folder) as opened:
            with opened.folder(self.temporary) as new:
                new.write(layout.STATE, sealed(body, indent=1))
            _replace(opened, self.temporary, self.name)


def _replace(folder: Folder, temporary: str, name: str) -> None:
    """Rename into place. Where one of the same step exists, it is set aside first and found again
    after a kill.
    """
    aside = layout.REPLACED + name
    if folder.status(name) is not None:
        folder.rename(name, aside)
    try:
        folder.rename(temporary, name)
    except OSError:
        if folder.status(aside) is not None:
            folder.rename(aside, name)
        raise
    folder.sync()
    with suppress(OSError):
        folder.remove_all(aside)


def _clean(folder: Folder) -> None:
    """Remove what a killed process left, and put back a checkpoint that was set aside but never
    replaced.
    """
    for entry in folder.names():
        if entry.startswith(layout.LEFTOVER):
            with suppress(OSError):
                folder.remove_all(entry)
        elif entry.startswith(layout.REPLACED):
            name = entry.removeprefix(layout.REPLACED)
            if folder.status(name) is not None:
                with suppress(OSError):
                    folder.remove_all(entry)
            else:
                folder.rename(entry, name)
