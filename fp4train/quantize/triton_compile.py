"""Triton kernels are compiled by one process of a machine; the others find them in Triton's cache
on its disk.
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds that a process waits for another that compiles the same kernel, before it compiles it as
well.
"""
FIRST_PAUSE = 0.001
LONGEST_PAUSE = 0.05
"""Seconds between two looks at a lock: what is only read from the disk is free soon."""

_log = logging.getLogger(__name__)


def compile_once(
    kernel: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> None:
    """Compile a kernel, or read it from the disk, before its first launch with such arguments.

    Processes that need it at the same time wait for the one that compiles it. Nothing is loaded or
    launched under the lock, so that no process holds it that waits for a GPU, and by it for the
    collective of another process. The system gives back the lock of a process that dies. In
    Triton's interpreter nothing happens.

    Args:
        arguments: those of the launch that are not named.
        options: constants of the kernel, and options of Triton.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        return
    folder = Path(knobs.cache.dir)
    listener = knobs.compilation.listener

    def listen(*, cache_hit: bool, **described: Any) -> None:
        if listener is not None:
            listener(cache_hit=cache_hit, **described)
        if not cache_hit:
            _say_that_kernels_are_compiled(folder)

    with locked(folder / "fp4train.locks" / f"{_name(kernel, arguments, options)}.lock"):
        knobs.compilation.listener = listen
        try:
            kernel.run(*arguments, grid=(1,), warmup=True, **options)
        finally:
            knobs.compilation.listener = listener


def _name(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> str:
    """A name that launches share where Triton compiles one kernel for them. Numbers are left out,
    which it looks at less closely: kernels that share a name are compiled one after the other.
    """
    types = [_type(argument) for argument in arguments]
    text = f"{kernel.fn.__module__}.{kernel.fn.__qualname__} {types} {sorted(options.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _type(argument: Any) -> str:
    if isinstance(argument, tuple):
        return str([_type(part) for part in argument])
    return str(getattr(argument, "dtype", type(argument).__name__))


@contextmanager
def locked(path: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock of a file, which is made with its folder; without the lock where it is held for
    longer than `patience` seconds, and where files cannot be made or locked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        _log.debug("kernels are compiled without a lock: %s", error)
        yield
        return
    try:
        _wait_for(descriptor, path, patience)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also of processes that were forked meanwhile
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path, patience: float) -> None:
    """Take the lock of an open file, or go on without it."""
    ends = time.monotonic() + patience
    pause = FIRST_PAUSE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= ends:
                _log.info(
                    "another process holds %s for %.0f s; the kernel is compiled here, too",
                    path,
                    patience,
                )
                return
        except OSError as error:
            _log.debug("kernels are compiled without a lock: %s", error)
            return
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


@cache
def _say_that_kernels_are_compiled(folder: Path) -> None:
    """Say it at the end of the first kernel that a process compiles; before, Triton does not
    tell.
    """
    _log.info("compiling GPU kernels for this machine; later starts find them in %s", folder)
