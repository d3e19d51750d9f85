"""Programs in a fork of the tests' process: it has imported everything, where a new interpreter
takes seconds to.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from ports import free_port


def forked(program: Callable[[], object]) -> int:
    """Run `program` in a fork; its exit code, or the negative number of the signal that ended
    it.
    """
    return exit_code(started(program))


def forked_ranks(count: int, program: Callable[[], object]) -> list[int]:
    """The exit codes of forks that run `program` beside each other, each in the environment of a
    rank that torchrun starts.
    """
    port = free_port()

    def as_rank(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        program()

    processes = [started(partial(as_rank, rank)) for rank in range(count)]
    return [exit_code(process) for process in processes]


def started(program: Callable[[], object]) -> int:
    """The id of a fork that runs `program`, which whoever starts it waits for (`exit_code`)."""
    with warnings.catch_warnings():
        # of forks beside threads; torch has none that wait here
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.stdout.flush()  # or the fork would print again what waits here
        process = os.fork()
    if not process:
        end_with(program)
    return process


def exit_code(process: int) -> int:
    """Wait for a fork to end."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def end_with(program: Callable[[], object], failed: int = 70) -> NoReturn:
    """Run `program` and end this process with its exit code; `failed` is that of an exception."""
    code = failed
    try:
        program()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
