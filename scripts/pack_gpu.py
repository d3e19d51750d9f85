"""Pack what a GPU machine without a network lacks into a folder to carry there:

    python scripts/pack_gpu.py FOLDER [--with NAME …] [--python 3.12] [--platform manylinux_2_28_x86_64] [--kernels]

and there, beside a copy of this checkout:

    pip install --no-index --no-deps FOLDER/*.whl

A machine with torch, Triton and transformers lacks four wheels for a run with `track=jsonl`, which `WHEELS` names;
their versions are those of constraints.txt. `--with matplotlib` adds a package and what it needs. Neither packed nor
downloaded is what the machine has (`MACHINE`), and pip must neither replace nor ask for it there (--no-deps).

`--kernels` adds FOLDER/kernels.tgz: the Triton kernels that `gpu_check.sh --total` launches there, compiled here
without a GPU for each `--sm` (90 and 100), which `gpu_check.sh --kernels FOLDER/kernels.tgz` takes. Triton finds them
only where Python, Triton and this checkout are the same: `--compiler` is such a Python, with Triton and without torch.
Those of liger and of torch.compile are compiled there.

The last lines say how much travels: the folder, and the files of the checkout beside it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import gpu_packed
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]

OF_TORCH = (
    "torch",
    "triton",
    "setuptools",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "filelock",
    "fsspec",
    "typing-extensions",
)
OF_TRANSFORMERS = (
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "tqdm",
    "pyyaml",
    "regex",
    "packaging",
)
MACHINE = frozenset({*OF_TORCH, *OF_TRANSFORMERS})
"""Packages that the machine has: torch and transformers, and what each version of them needs."""

WHEELS = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "liger-kernel")
"""Packages that a training run imports and a machine with torch and transformers lacks."""

SOURCES = ("antlr4-python3-runtime",)
"""Packages without a wheel on PyPI. Theirs are built here: they hold Python alone, and fit every
machine.
"""

PROCESSORS = ("x86_64", "aarch64")

METADATA = re.compile(r"[^/]+\.dist-info/METADATA")

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine that the wheels are for.

    Args:
        python: its version of Python, such as "3.12".
        platform: the newest tag of platforms whose wheels run there.
    """

    python: str
    platform: str

    def options(self) -> list[str]:
        """Options with which pip chooses wheels for this machine."""
        platforms = [word for tag in self.platforms() for word in ("--platform", tag)]
        version = ("--python-version", self.python, "--implementation", "cp")
        return ["--only-binary", ":all:", *version, *platforms]

    @property
    def processor(self) -> str:
        """The last word of the tag: "x86_64" or "aarch64"."""
        return next((name for name in PROCESSORS if self.platform.endswith(name)), "")

    def satisfies(self, marker: Marker, extras: Collection[str]) -> bool:
        """Whether a requirement with this marker counts there, of a package that is asked for with
        those extras.
        """
        linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
        python = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        machine = {"platform_machine": self.processor, "implementation_name": "cpython"}
        there = linux | python | machine
        return any(marker.evaluate(there | {"extra": extra}) for extra in ("", *extras))

    def platforms(self) -> list[str]:
        """The tag itself and, of manylinux_2_28_x86_64, those of older systems."""
        newest = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", self.platform)
        if newest is None:
            return [self.platform]
        minor = int(newest[1])
        processor = newest[2]
        older = [f"manylinux_2_{version}_{processor}" for version in range(minor, 4, -1)]
        legacy = [f"manylinux{name}_{processor}" for name in ("2014", "2010", "1")]
        return [*older, *legacy]


def normalised(name: str) -> str:
    """The name of a package as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Package → "name==version", as constraints.txt pins it."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [line.strip() for line in lines if "==" in line]
    return {normalised(line.partition("==")[0]): line for line in pinned}


def pip(*words: str) -> None:
    """Run pip; its errors are printed and end this program."""
    done = subprocess.run([*PIP, *words])
    if done.returncode:
        raise SystemExit(f"pack_gpu: pip {words[0]} ended with {done.returncode}")


def pack(folder: Path, names: Sequence[str], target: Target) -> None:
    """Fill `folder` with a wheel of each package, and of all that they need and the machine lacks.

    Packages are read one by one, so that no resolver of pip downloads torch only to see what it
    needs.
    """
    pinned = pins()
    packed: set[str] = set()
    pending = [Requirement(pinned[name]) for name in names]
    while pending:
        requirement = pending.pop(0)
        name = normalised(requirement.name)
        if name not in packed | MACHINE:
            packed.add(name)
            wheel = fetched(
                pinned.get(name, f"{requirement.name}{requirement.specifier}"), folder, target
            )
            pending += needs(wheel, requirement.extras, target)


def fetched(requirement: str, folder: Path, target: Target) -> Path:
    """The wheel of a requirement, which pip downloads or builds into `folder`."""
    before = set(folder.iterdir())
    if normalised(Requirement(requirement).name) in SOURCES:
        pip("wheel", "--no-deps", "--wheel-dir", str(folder), requirement)
    else:
        pip("download", "--no-deps", "--dest", str(folder), *target.options(), requirement)
    (wheel,) = set(folder.iterdir()) - before
    return wheel


def needs(wheel: Path, extras: Collection[str], target: Target) -> list[Requirement]:
    """What the metadata of a wheel require on the target, with those extras of it."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if METADATA.fullmatch(name))
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])
    requirements = map(Requirement, lines)
    return [
        each
        for each in requirements
        if each.marker is None or target.satisfies(each.marker, extras)
    ]


def checkout_bytes() -> int:
    """Size of the files of this checkout that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    paths = {ROOT / name.decode() for name in names if name}
    return sum(path.stat().st_size for path in paths if path.is_file())


def read(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="new or empty")
    parser.add_argument(
        "--with", dest="extras", action="append", default=[], metavar="NAME",
        help="another package of constraints.txt, with what it needs; may be repeated",
    )  # fmt: skip
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument(
        "--platform", default="manylinux_2_28_x86_64", help="newest tag of wheels that run there"
    )
    parser.add_argument("--kernels", action="store_true", help="pack compiled kernels, too")
    parser.add_argument(
        "--sm", type=int, action="append", choices=gpu_packed.PROCESSORS,
        help="compute capability times ten of the GPU; may be repeated; both by default",
    )  # fmt: skip
    parser.add_argument(
        "--triton", default="3.6.0", help="version of Triton there; torch 2.11 has 3.6.0"
    )
    parser.add_argument(
        "--compiler",
        metavar="PYTHON",
        help="Python that compiles; by default that of --python in PATH",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=60,
        metavar="MB",
        help="of the folder and the checkout together",
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = read(words)
    folder: Path = options.folder
    if folder.exists() and any(folder.iterdir()):
        print(f"pack_gpu: {folder} is not empty", file=sys.stderr)
        return 2
    extras = [normalised(name) for name in options.extras]
    check_extras(extras)
    program = options.compiler or f"python{options.python}"
    compiler = gpu_packed.Compiler(program=program, python=options.python, triton=options.triton)
    if options.kernels and (reason := compiler.why_not()) is not None:
        print(f"pack_gpu: --kernels: {reason}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    pack(folder, [*WHEELS, *extras], Target(python=options.python, platform=options.platform))
    if options.kernels:
        gpu_packed.pack(folder, sorted(set(options.sm or gpu_packed.PROCESSORS)), compiler)
    return say_size(folder, options.limit)


def check_extras(names: Collection[str]) -> None:
    """Refuse what cannot be added.

    Raises:
        SystemExit: the machine has a package of this name, or constraints.txt pins none.
    """
    for name in names:
        if name in MACHINE:
            raise SystemExit(
                f"pack_gpu: --with {name}: the machine has it, with torch and transformers"
            )
        if name not in pins():
            raise SystemExit(f"pack_gpu: --with {name}: constraints.txt pins no such package")


def say_size(folder: Path, limit: float) -> int:
    """Print what travels and how it is installed; returns the exit code."""
    sizes = {
        path.name: path.stat().st_size / 1e6 for path in sorted(folder.rglob("*")) if path.is_file()
    }
    for name, size in sizes.items():
        print(f"{size:8.2f} MB  {name}")
    packed = sum(sizes.values())
    checkout = checkout_bytes() / 1e6
    print(f"{packed:8.2f} MB  {folder}, {packed + checkout:.1f} MB with the files of this checkout")
    print(f"there: pip install --no-index --no-deps {folder}/*.whl")
    if packed + checkout > limit:
        print(f"pack_gpu: more than {limit:g} MB (--limit)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
