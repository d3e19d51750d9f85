"""Kernels that are compiled here, packed for a GPU machine, and found there: for `pack_gpu.py` and `gpu_check.py`.

The archive holds, for each compute capability, what is launched (`gpu_recorded.py`) as smNN.json and Triton's cache
(`gpu_compile.py`) as the folder smNN, without the kernels' intermediate source, which Triton does not need.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent

NAME = "kernels.tgz"

PROCESSORS = {90: 132, 100: 148}
"""Compute capability times ten → multiprocessors: of an H100 and an H200, and of a B200."""

PATIENCE = 60.0
"""Seconds that kernels may take to be unpacked and counted."""

VERSIONS = """
import json, sys
try:
    import triton
    version = triton.__version__
except ImportError:
    version = None
print(json.dumps(["%d.%d" % sys.version_info[:2], version]))
"""


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A Python with a Triton, which need no torch.

    Args:
        program: its path or its name in PATH.
        python, triton: the versions that it must have, such as "3.12" and "3.6.0".
    """

    program: str
    python: str
    triton: str

    def why_not(self) -> str | None:
        """Why it cannot compile what the other machine finds, in words; None: it can."""
        remedy = (
            f"--compiler names a Python {self.python} with Triton {self.triton}, such as a "
            "virtual environment's "
            f"after `pip install --no-deps triton=={self.triton}`"
        )
        if shutil.which(self.program) is None:
            return f"{self.program} is not there; {remedy}"
        done = subprocess.run([self.program, "-c", VERSIONS], capture_output=True, text=True)
        if done.returncode:
            return (
                f"{self.program} does not run: "
                f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}"
            )
        python, triton = json.loads(done.stdout.splitlines()[-1])
        if python != self.python:
            return f"{self.program} is Python {python}; {remedy}"
        if triton is None:
            return f"{self.program} has no Triton; {remedy}"
        if triton != self.triton:
            return f"{self.program} has Triton {triton}; {remedy}"
        if shutil.which("gcc") is None:
            return "gcc is not there, which compiles the code that launches kernels"
        return None


def record(path: Path, capability: int) -> None:
    """Write what is launched on a GPU of this capability."""
    words = [str(path), "--sm", str(capability), "--processors", str(PROCESSORS[capability])]
    subprocess.run([sys.executable, str(SCRIPTS / "gpu_recorded.py"), *words], check=True)


def pack(folder: Path, capabilities: Sequence[int], compiler: Compiler) -> None:
    """Compile what is launched for these capabilities into an archive in `folder`, and say how many
    kernels it has.

    Raises:
        SystemExit: a program failed, which said why.
    """
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(folder / NAME, "w:gz") as archive:
        for capability in capabilities:
            launches = Path(temporary, f"sm{capability}.json")
            cache = Path(temporary, f"sm{capability}")
            record(launches, capability)
            words = [str(launches), str(cache), "--sm", str(capability)]
            program = [compiler.program, str(SCRIPTS / "gpu_compile.py"), *words]
            output = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout
            counts = json.loads(output.splitlines()[-1])
            archive.add(launches, launches.name)
            archive.add(
                cache,
                cache.name,
                filter=lambda file: None if file.name.endswith(".source") else file,
            )
            print(
                f"{counts['kernels']} kernels for compute capability {capability / 10:.1f}",
                flush=True,
            )


def unpack(packed: Path, cache: Path, capability: str) -> str:
    """Copy the kernels of a capability, such as "9.0", into Triton's cache; returns a line that
    counts how many of those that are launched this Python and Triton find there, or says why none
    was copied.
    """
    name = f"sm{capability.replace('.', '')}"
    try:
        with tempfile.TemporaryDirectory() as temporary, tarfile.open(packed) as archive:
            members = [
                member
                for member in archive.getmembers()
                if member.name.partition("/")[0].startswith(name)
            ]
            if not members:
                return f"kernels compiled beforehand: none for compute capability {capability}"
            archive.extractall(temporary, members, filter="data")
            words = [
                f"{temporary}/{name}.json",
                str(cache),
                "--sm",
                name[2:],
                "--from",
                f"{temporary}/{name}",
                "--check",
            ]
            program = [sys.executable, str(SCRIPTS / "gpu_compile.py"), *words]
            done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
            if done.returncode not in (0, 1) or not done.stdout:
                return (
                    "kernels compiled beforehand: "
                    f"{(done.stderr.strip().splitlines() or ['no message'])[-1]}"
                )
            counts = json.loads(done.stdout.splitlines()[-1])
    except (OSError, tarfile.TarError, ValueError, subprocess.TimeoutExpired) as error:
        return f"kernels compiled beforehand: {packed} cannot be used: {error}"
    return (
        f"kernels compiled beforehand: {counts['found']} found, {counts['missing']} missing, "
        "which are compiled here"
    )
