"""The C extension is there for its tests. It is optional for users, and without it they would be skipped in silence."""

import os
import shutil
import sysconfig

import pytest

from fp4train.kernels import cpu


def compiler() -> str | None:
    """The C compiler that setuptools would call, where there is one."""
    command = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    return shutil.which(command[0]) if command else None


def test_the_kernels_are_built_in_ci_and_wherever_there_is_a_compiler() -> None:
    reason = cpu.unavailable()
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI={os.environ['CI']} and {reason}: the CPU kernels would go untested")
    if found := compiler():
        pytest.fail(f"{found} could build it, but {reason} (python setup.py build_ext --inplace): kernels go untested")
