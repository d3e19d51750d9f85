"""Programs in a fork of the tests' process: it has imported everything, where a new interpreter
takes seconds to.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn


def forked(program: Callable[[], object]) -> int:
    """Run `program` in a fork; its exit code, or the negative number of the signal that ended
    it.
    """
    with warnings.catch_warnings():
        # of forks beside threads; torch has none that wait here
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if not process:
        _run(program)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _run(program: Callable[[], object]) -> NoReturn:
    code = 70
    try:
        program()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
