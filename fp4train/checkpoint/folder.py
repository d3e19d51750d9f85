"""Checkpoints: written atomically, verified at load, free of pickle.

Layout, one directory a step::

    RUN/checkpoints/step_00000120/weights.safetensors    the weights, on the CPU, in their own dtype
                                  tensors.safetensors    all other tensors: moments, random states, scales
                                  state.json             version, step, checksums, and all that is not a tensor

Who wants the weights alone neither reads nor verifies the moments (`load(…, kind=WEIGHTS)`).

Several ranks write two files each, `weights-00003-of-00008.safetensors` and
`tensors-00003-of-00008.safetensors`, with the parts of the tensors that the rank owns; no rank ever
holds more than its parts. The first rank makes the directory, and when all have written and synced
their files, it writes state.json with every file's size and SHA-256, renames, and removes what is
too old. All ranks agree after each of these steps: where one of them fails, none counts the
checkpoint, and each raises the failing rank's reason. Each then reads the parts it wants, whatever
the number of ranks was (`reading.py`).

Why a directory that is renamed: a rename is atomic, so a checkpoint either exists whole or does not
exist. Everything is written and fsynced in a hidden directory beside it first; a process killed
meanwhile leaves only that, and the next `save` removes it. Older checkpoints go after the newer one
is complete, never before.

Why checksums: a file system that lost power, or a copy that stopped half-way, leaves files of the
right name. `load` verifies all files before anything is read, each rank a part of them, and falls
back to the newest checkpoint that is whole, saying which it skipped and why.

Why safetensors and JSON: loading executes nothing and can name no code. Floats survive exactly
(shortest round-trip decimal); NaN and infinities, which JSON lacks, are written ``{"$float":
"nan"}``.

One process, or one group of ranks, writes to a folder at a time.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from fp4train.checkpoint import layout
from fp4train.checkpoint.layout import ALONE, CheckpointGroup, opened_folder
from fp4train.checkpoint.reading import StoredTensors, Unusable, read
from fp4train.checkpoint.tree import JSON
from fp4train.checkpoint.writing import KINDS, Writing
from fp4train.errors import UserError, in_words
from fp4train.files import Folder
from fp4train.sealed import sealed, unsealed
from fp4train.shards import TensorShard
from fp4train.text import typed

_log = logging.getLogger(__name__)


Keep = Callable[[list[int]], Collection[int]]
"""A choice, of the steps that have a checkpoint, ascending, the newest one last: those that stay."""


class CheckpointError(UserError):
    """A checkpoint could not be written (disk full, no permission, ...). The earlier ones are
    untouched.
    """


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint, as `load` finds it.

    Args:
        step: optimiser steps done when it was written.
        tensors: name to CPU tensor, whole or by parts, read when asked for; each has memory of its
            own.
        state: values that were passed to `save` as `state`.
        path: the directory it came from.
        skipped: newer checkpoints that could not be used, each with the reason; `load` has warned
            of them, and of a doubt about this one.
    """

    step: int
    tensors: StoredTensors
    state: dict[str, JSON]
    path: Path
    skipped: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """The run directory that it lies in."""
        return self.path.parent.parent

    @property
    def doubt(self) -> str | None:
        """Why it may be useless; None: no reason is known."""
        return self.state.get(layout.DOUBT)  # type: ignore[return-value]


def save(
    folder: Path | Folder,
    step: int,
    tensors: Mapping[str, Tensor] | Mapping[str, TensorShard],
    state: Mapping[str, JSON],
    *,
    keep: int | Keep,
    ranks: CheckpointGroup = ALONE,
    kinds: Mapping[str, str] = KINDS,
) -> Path:
    """Write the checkpoint of `step` into `folder` and remove those that `keep` leaves out.

    Checkpoints of later steps belong to a future that a resume abandoned; they are removed once
    this one is complete. Of several ranks all call this, with the same arguments but for their
    tensors.

    Args:
        folder: RUN/checkpoints, open or as a path; created if missing, never followed if it is a
            link.
        step: optimiser steps done.
        tensors: any device, dtype, strides and sharing, DTensors included; each is brought to the
            CPU. Or the parts that this rank writes (`shards.owned`).
        state: plain JSON values (see `flatten` for anything nested with tensors, tuples or integer
            keys); of several ranks the first one's, joined with those of the ranks that lead a
            stage.
        keep: checkpoints that stay, this one among them; a number stands for the newest ones.
        ranks: the ranks that write it.
        kinds: kind of file of a state's tensors, by the state's key; those of other keys are in
            files of `layout.TENSORS`.

    Returns:
        The directory of the new checkpoint.

    Raises:
        CheckpointError: it could not be written; nothing that was there before is changed.
        ValueError, TypeError: step, keep or a value is not acceptable.
    """
    if step < 0:
        raise ValueError(f"step={step}: a checkpoint's step is 0 or more")
    if isinstance(keep, int) and keep < 1:
        raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
    if isinstance(folder, Folder):
        place = folder.path
    else:
        place = folder
    try:
        Writing(folder, step, ranks, kinds).write(tensors, state)
        if ranks.first:
            prune(folder, step, keep)
    except OSError as error:
        there: list[int] = []
        with suppress(UserError):
            there = steps(place)
        raise CheckpointError(
            f"checkpoint of step {step} not written to {place}: {in_words(error, str(place))}. "
            f"Earlier checkpoints are untouched: {_list(there)}."
        ) from error
    return place / layout.directory_name(step)


def load(
    folder: Path,
    step: int | None = None,
    *,
    kind: str | None = None,
    ranks: CheckpointGroup = ALONE,
    verify: bool = True,
    room: int = 0,
) -> Checkpoint:
    """The newest whole checkpoint in `folder`, or the one of `step` exactly.

    All files are verified, and no tensor is read yet. Several ranks verify a part of the files each
    and find the same checkpoint. A warning names every newer one that is skipped, and says that the
    one that is taken is doubtful.

    Args:
        kind: kind of the files that are verified and whose tensors are found, whatever has become
            of the others; None: all kinds.
        ranks: the ranks that read it.
        verify: whether the files are compared with their checksums; without it, for a look at what
            there is, their headers alone are read, and no doubt is told.
        room: bytes of main memory for copies of what this rank verifies, from which its tensors are
            read (`StoredTensors.close`).

    Raises:
        UserError: nothing usable (every checkpoint is named with its reason), or written by a newer
            fp4train.
    """
    folder = Path(folder)
    names = _found_by_the_first(folder, ranks)
    if step is not None and step not in names:
        raise UserError(f"{folder} has no checkpoint of step {step}; it has {_list(names)}")
    if not names:
        raise UserError(f"no checkpoint in {folder}")
    skipped: list[tuple[Path, str]] = []
    if step is None:
        candidates = sorted(names, reverse=True)
    else:
        candidates = [step]
    for candidate in candidates:
        path = folder / names[candidate]
        problem = None
        newer = None
        try:
            with opened_folder(folder) as opened, opened.folder(path.name) as checkpoint:
                verifying = ranks if verify else None
                tensors, state = read(checkpoint, candidate, verifying, kind=kind, room=room)
        except Unusable as reason:
            problem = str(reason)
        except OSError as error:
            problem = in_words(error)
        except UserError as error:
            newer = str(error)
        if newer := ranks.agree(newer):
            raise UserError(newer)
        if problem := ranks.agree(problem):
            skipped.append((path, problem))
            continue
        if ranks.first:
            _warn(skipped, path)
        if ranks.first and verify:
            _warn_of_doubt(path, state, names)
        return Checkpoint(step=candidate, tensors=tensors, state=state, path=path, skipped=skipped)
    reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
    if step is None or len(names) == 1:
        raise UserError(f"no usable checkpoint in {folder}: {reasons}")
    raise UserError(
        f"the checkpoint of step {step} in {folder} cannot be used: {reasons}. Others in the "
        f"folder: {_list(set(names) - {step})}"
    )


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; whether they are whole is known to `load` only.

    Raises:
        UserError: the folder cannot be read, or is a link.
    """
    return sorted(_directories(folder))


def _warn(skipped: Iterable[tuple[Path, str]], taken: Path) -> None:
    """Say which checkpoints are passed over, and what is taken in their place: `load` does, so that
    nobody who takes an older checkpoint does so in silence.
    """
    text = "checkpoint %s cannot be used (%s); %s is taken in its place"
    for path, reason in skipped:
        _log.warning(text, path.name, reason, taken)


def _warn_of_doubt(path: Path, state: Mapping[str, JSON], steps: Collection[int]) -> None:
    if not (doubt := state.get(layout.DOUBT)):
        return
    run = path.parent.parent
    good = state.get(layout.GOOD)
    if good in steps:
        cure = f"the newest good one is {run}@{good} (resume={typed(run)} resume_step={good})"
    else:
        cure = "none of the run is known to be good"
    _log.warning("checkpoint %s of %s is doubtful: %s; %s", path.name, run, doubt, cure)


def set_doubt(
    folder: Path | Folder, since: int, doubt: str | None, *, good: int | None = None
) -> None:
    """Mark the checkpoints from step `since` on as doubtful, for the reason `doubt`, but for the one
    of step `good`; None: take their marks away.

    What cannot be marked is reported.
    """
    with opened_folder(folder) as opened:
        for step, name in _steps_in(opened).items():
            if step < since or step == good:
                continue
            try:
                with opened.folder(name) as place:
                    body = unsealed(place.read(layout.STATE, layout.STATE_LIMIT))
                    state = body["state"]
                    if bool(state.pop(layout.DOUBT, None)) != bool(doubt):
                        if doubt:
                            state |= {layout.DOUBT: doubt, layout.GOOD: good}
                        place.write(layout.STATE, sealed(body, indent=1))
            except (OSError, ValueError, LookupError, TypeError) as error:
                _log.warning("the doubt about checkpoint %s is not written: %s", name, error)


def prune(folder: Path | Folder, newest: int, keep: int | Keep) -> None:
    """Remove all checkpoints but those of `keep` (see `save`) among those up to step `newest`.

    What cannot be removed is reported.
    """
    with opened_folder(folder) as opened:
        there = {step: name for step, name in _steps_in(opened).items() if opened.has_folder(name)}
        past = sorted(step for step in there if step <= newest)
        if isinstance(keep, int):
            stay = set(past[-keep:])
        else:
            stay = set(keep(past))
        for step in sorted(set(there) - stay):
            doomed = f"{layout.LEFTOVER}{layout.directory_name(step)}"
            try:
                # first out of sight: a kill meanwhile leaves no damaged checkpoint
                opened.rename(there[step], doomed)
                opened.remove_folder(doomed)
            except OSError as error:
                _log.warning(
                    "old checkpoint %s could not be removed: %s", opened.path / there[step], error
                )


def _found_by_the_first(folder: Path, ranks: CheckpointGroup) -> dict[int, str]:
    """The checkpoints by step; of several ranks the first looks, so that all try the same ones."""
    names: dict[int, str] = {}
    problem = None
    try:
        if ranks.first:
            names = _directories(folder)
    except UserError as error:
        problem = str(error)
    if problem := ranks.agree(problem):
        raise UserError(problem)
    return ranks.gathered(names)[0]


def _directories(folder: Path) -> dict[int, str]:
    try:
        with opened_folder(folder) as opened:
            return _steps_in(opened)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {in_words(error, str(folder))}") from error


def _steps_in(folder: Folder) -> dict[int, str]:
    names: dict[int, str] = {}
    for name in folder.names():  # ".old_..." sorts before "step_...", which therefore wins
        match = layout.NAME.fullmatch(name.removeprefix(layout.REPLACED))
        if match:  # a thing of another kind, too: `load` says that it is no checkpoint
            names[int(match[1])] = name
    return names


def _list(steps: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"
