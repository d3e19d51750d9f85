"""What a power cut leaves of a folder: only what was synced."""

from __future__ import annotations

import contextlib
import marshal
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storms.ground import SCENARIOS, STEPS, TRAINING, Ground, Result, call, goes_on

Entries = dict[str, tuple[int, bool]]
"""Of a folder: name → inode, and whether that is a folder."""


class PowerCut:
    """Records, while it is entered, what any thread makes durable in the folders below `root`.

    The model is the least that POSIX promises: a file holds what it held when it was last synced,
        nothing if it never
    was, and a folder has the names that it had when *it* was last synced. What `root` holds at the
    start is durable.

    `os.fsync` only records then, which is also faster.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.synced: list[tuple[int, bytes | Entries]] = []
        """(inode, what it held), one after another."""
        # open descriptors, so that no inode's number is given to another one
        self._held: dict[int, int] = {}
        self._inode = os.stat(root).st_ino
        self._fsync = os.fsync
        for folder, _, names in os.walk(root):
            for name in (".", *names):
                descriptor = os.open(
                    os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                )
                self._record(descriptor)
                os.close(descriptor)
        self.start = len(self.synced)

    def __enter__(self) -> PowerCut:
        os.fsync = self._record  # type: ignore[assignment]  # here all are called with descriptors
        return self

    def __exit__(self, *raised: object) -> None:
        os.fsync = self._fsync

    def close(self) -> None:
        """Let go of the inodes; `rebuild` needs none."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    @property
    def moments(self) -> range:
        """Numbers of calls of fsync after which the power may fail; between two of them nothing
        more is durable.
        """
        return range(self.start, len(self.synced) + 1)

    def rebuild(self, place: Path, moment: int | None = None) -> Path:
        """Make `place` what `root` would be after a power cut at `moment` (the end)."""
        durable = dict(self.synced[:moment])
        self._rebuild(place, self._inode, True, durable)
        return place

    def _rebuild(self, place: Path, inode: int, folder: bool, durable: dict[int, Any]) -> None:
        if not folder:
            place.write_bytes(durable.get(inode, b""))
            return
        place.mkdir()
        for name, (child, inner) in durable.get(inode, {}).items():
            self._rebuild(place / name, child, inner, durable)

    def _record(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._hold(status.st_ino, f"/proc/self/fd/{descriptor}", os.O_PATH)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                there = {e.name: (e.inode(), e.is_dir(follow_symlinks=False)) for e in entries}
            for name, (inode, _) in there.items():
                with contextlib.suppress(FileNotFoundError):
                    self._hold(inode, name, os.O_PATH | os.O_NOFOLLOW, descriptor)
            self.synced.append((status.st_ino, there))
        elif stat.S_ISREG(status.st_mode):
            self.synced.append((status.st_ino, Path(f"/proc/self/fd/{descriptor}").read_bytes()))

    def _hold(self, inode: int, path: str, flags: int, folder: int | None = None) -> None:
        if inode not in self._held:
            self._held[inode] = os.open(path, flags, dir_fd=folder)


@contextlib.contextmanager
def recorded(root: Path, into: Path) -> Iterator[None]:
    """Leave in the file `into` what was made durable in `root`, for `replayed`."""
    with PowerCut(root) as power:
        yield
    into.write_bytes(marshal.dumps((power.synced, power.start, power._inode)))


def replayed(root: Path, into: Path) -> PowerCut:
    """What `recorded` has left."""
    power = PowerCut.__new__(PowerCut)
    power.root = root
    power._held = {}
    power.synced, power.start, power._inode = marshal.loads(into.read_bytes())
    return power


def power_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A recorded command is cut off at a random call of fsync, or after its end; then the same
    command again.
    """
    name = draw.choice(tuple(SCENARIOS))

    def record() -> PowerCut:
        there = ground.copy(ground.folder / f"power_{name}")
        into = ground.folder / f"{name}.power"
        code, out = call(there, *SCENARIOS[name].command, around=lambda: recorded(there, into))
        if code:
            raise SystemExit(f"{name} failed when it was recorded: {out}")
        return replayed(there, into)

    power: PowerCut = ground.once(("power", name), record)
    moment = draw.choice(power.moments)
    place.rmdir()
    power.rebuild(place, moment)
    seen = ""
    if moment == power.moments[-1]:
        saved = name not in TRAINING or bool(
            list(place.glob(f"runs/*/checkpoints/step_{STEPS:08d}"))
        )
        if not saved or SCENARIOS[name].result(place) != ground.undisturbed(name).result:
            seen = "what had ended is lost"
    seen = seen or goes_on(ground, name, place)
    return Result(
        name,
        not seen,
        seen and f"after fsync {moment - power.start} of {len(power.moments) - 1}: {seen}",
    )
