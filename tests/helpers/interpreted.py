"""Programs whose Triton kernels are interpreted on the CPU, each in a process of its own: Triton decides when a kernel
is defined whether it is interpreted.

The interpreter takes half its time here: what it does again for each call of a function within a kernel is done once.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).parent


def interpreted(*command: str, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with the arguments `command`, `-c` and code or a file first, and the tests' helpers and scripts to import.

    variables: of its environment, besides.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    folders = (HELPERS, HELPERS.parents[1] / "scripts", os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(str(each) for each in folders if str(each))
    command = (sys.executable, "-W", "ignore", __file__, *command)  # numpy warns of divisions by zero
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def hasten(checks_overflow: bool = True) -> None:
    """From here on, in this process. checks_overflow: sums and products of integers are compared with those in 64 bits,
    for a quarter of the time."""
    from triton.runtime import interpreter

    of_any, of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (of_any if dtype.scalar.is_ptr() else of_scalar)(dtype.scalar)
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", checks_overflow)


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_patch_lang`, which puts the interpreter's functions into the modules of Triton's language that a function sees,
    until the launch ends; not again for what the launch has patched."""
    launches: list[set[str]] = []

    def patch_for(function: Any) -> Any:
        seen = modules(function)
        if launches and seen <= launches[-1]:
            return None
        scope = patch(function)
        if launches:
            launches[-1] |= seen
            return None
        launches.append(set(seen))
        restore = scope.restore

        def end() -> None:
            launches.pop()
            restore()

        scope.restore = end
        return scope

    return patch_for


@cache
def modules(function: Any) -> frozenset[str]:
    from triton import language

    known = (language, language.core)
    return frozenset(each.__name__ for each in function.__globals__.values() if any(each is one for one in known))


if __name__ == "__main__":
    hasten()
    first, *rest = sys.argv[1:]
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
