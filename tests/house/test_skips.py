"""What tests are skipped without is there where they must run: users may lack it, CI may not.

In CI that is the C extension, all else that `make test` installs, and a C++ compiler. The golden
vectors are in every clone.
"""

import importlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from fp4train.backends import native
from fp4train.backends.te import availability
from fp4train.kernels import cpu
from fp4train.precision import compile_context

LINUX = ("triton", "liger_kernel")
"""What is installed on Linux alone."""
PACKAGES = (*LINUX, "torchao.prototype.mx_formats.utils", "pydantic", "wandb", "tensorboard")
"""What tests import or are skipped; Transformer Engine's wheel is asked for its version instead."""


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
        pytest.fail(
            f"{found} could build it, but {reason} (python setup.py build_ext --inplace): "
            "kernels go untested"
        )


def test_inductors_compiler_is_there_in_ci() -> None:
    if os.environ.get("CI") and shutil.which("g++") is None:
        pytest.fail(
            f"CI={os.environ['CI']} and no g++ is there: what torch.compile makes of the "
            "layers goes untested"
        )


def test_layers_are_part_of_compiled_graphs_in_ci() -> None:
    if os.environ.get("CI") and compile_context.UNAVAILABLE is not None:
        pytest.fail(
            f"CI={os.environ['CI']} and {compile_context.UNAVAILABLE}: compiled layers go untested"
        )


def test_processes_are_listed_in_ci() -> None:
    """Tests that kill or stop wandb's service find it through /proc, which macOS lacks."""
    if os.environ.get("CI"):
        assert Path("/proc/self/cmdline").exists(), (
            "no /proc: a service that dies or stands still goes untested"
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_that_tests_are_skipped_without_are_installed_in_ci(package: str) -> None:
    if not os.environ.get("CI") or (package in LINUX and sys.platform != "linux"):
        return
    try:
        importlib.import_module(package)
    except ImportError as error:
        pytest.fail(
            f"CI={os.environ['CI']} and {package} is not there ({error}): tests that need it "
            "are skipped"
        )


def test_transformer_engines_wheel_is_installed_in_ci() -> None:
    if os.environ.get("CI") and (availability.version() or ()) < (2, 20):
        pytest.fail(
            f"CI={os.environ['CI']} and no transformer_engine from 2.20 on is there: its "
            "tests are skipped"
        )


def test_what_needs_this_torch_is_not_skipped_in_ci() -> None:
    """Tests of compiled layers and of row-scaled products on CPUs are left out on an older torch
    only.
    """
    if os.environ.get("CI"):
        assert compile_context.UNAVAILABLE is None, compile_context.UNAVAILABLE
        assert native.cpu_multiplies_rows(), (
            "this torch multiplies no rows on CPUs: scaled_mm by row goes untested"
        )
