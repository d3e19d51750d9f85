"""The copy of a run on a store such as s3://, made beside training.

The state of a checkpoint is uploaded last and removed first: one without it is not whole.
"""

from collections.abc import Collection

from fp4train.checkpoint import STATE, directory_name, steps
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.run.record import directory as parts
from fp4train.stores import StorePath
from fp4train.track.metrics import LIMIT
from fp4train.track.statistics import STATISTICS

_IDENTITY = len("# fp4train run 0123456789abcdef")
"""Bytes of a configuration that hold the run's identity."""


def upload(run: Folder, place: str, before: Collection[int]) -> Collection[int]:
    """Give the copy of a run the checkpoints that the run has. Removed there are halves of
    checkpoints, and those that the run has no longer.

    Args:
        place: the copy's folder.
        before: steps whose checkpoints the run had at the last call.

    Returns:
        Those whose checkpoints it has now.

    Raises:
        UserError, OSError: something failed; what is whole there stays.
    """
    there = StorePath(place)
    objects = {path.relative_to(there).parts: path for path in there.listed("find")}
    config = objects.get((parts.CONFIG,))
    if config and config.open().read(_IDENTITY) != run.read(parts.CONFIG, LIMIT)[:_IDENTITY]:
        raise UserError(f"{there} holds another run: remove it, or name another folder or run")
    for name in (parts.CONFIG, parts.HISTORY, parts.METRICS, STATISTICS, *parts.TOKENIZER):
        if run.has_file(name):
            (there / name).put(run, name)
    now = steps(run.path / parts.CHECKPOINTS)
    local = [*map(directory_name, now)]
    for step in local:
        with run.folder(parts.CHECKPOINTS) as folder, folder.folder(step) as files:
            if state := objects.get((parts.CHECKPOINTS, step, STATE)):
                if state.open().read() == files.read(STATE, LIMIT):
                    continue
                state.delete()
            for name in sorted(files.names(), key=STATE.__eq__):
                (there / parts.CHECKPOINTS / step / name).put(files, name)
    pruned = {*map(directory_name, before)}
    complete = {names[1] for names in objects if names[2:] == (STATE,)}
    halves = {names[1] for names in objects if len(names) == 3} - complete
    gone = (pruned | halves) - {*local}
    for names in sorted(objects, key=lambda names: names[2:] != (STATE,)):
        if len(names) == 3 and names[0] == parts.CHECKPOINTS and names[1] in gone:
            objects[names].delete()
    return now
