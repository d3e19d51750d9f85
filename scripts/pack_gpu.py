"""Pack what a GPU machine without a network lacks into a folder to carry there:

    python scripts/pack_gpu.py FOLDER [--with NAME …] [--python 3.12] [--platform manylinux_2_28_x86_64]

and there, beside a copy of this checkout:

    pip install --no-index --no-deps FOLDER/*.whl

A machine with torch, Triton and transformers lacks four wheels for a run with `track=jsonl`, which `WHEELS` names;
their versions are those of constraints.txt. `--with matplotlib` adds a package and what it needs. Never packed is what
torch and transformers themselves need: it is on the machine, and pip must neither replace nor ask for it (--no-deps).

The last lines say how much travels: the folder, and the files of the checkout beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MACHINE = ("torch", "transformers")
"""Packages that the machine has, with all that they need; torch's wheels for Linux need Triton."""

WHEELS = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "liger-kernel")
"""Packages that a training run imports and a machine with torch and transformers lacks."""

SOURCES = ("antlr4-python3-runtime",)
"""Packages without a wheel on PyPI. Theirs are built here: they hold Python alone, and fit every machine."""

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

    def platforms(self) -> list[str]:
        """The tag itself and, of manylinux_2_28_x86_64, those of older systems."""
        newest = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", self.platform)
        if newest is None:
            return [self.platform]
        minor, processor = int(newest[1]), newest[2]
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


def resolved(requirements: list[str], target: Target) -> dict[str, str]:
    """Package → "name==version" of `requirements` and of all that they need, from metadata alone.

    Raises:
        SystemExit: pip finds no wheels for them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        dry = ("install", "--dry-run", "--ignore-installed", "--target", folder)
        quiet = ("--quiet", "--report", str(report))
        pip(*dry, *quiet, *target.options(), *requirements)
        installs = json.loads(report.read_text("utf-8"))["install"]
    packages = [install["metadata"] for install in installs]
    return {normalised(p["name"]): f"{p['name']}=={p['version']}" for p in packages}


def wheels(extras: list[str], target: Target) -> list[str]:
    """What is packed, as "name==version": `WHEELS`, and `extras` with what they need.

    Raises:
        SystemExit: constraints.txt pins no package of a name, or the machine has it.
    """
    pinned = pins()
    if unknown := [name for name in extras if normalised(name) not in pinned]:
        raise SystemExit(f"pack_gpu: --with {unknown[0]}: constraints.txt pins no such package")
    packed = {name: pinned[name] for name in WHEELS}
    if extras:
        machine = resolved(list(MACHINE), target)
        if present := [name for name in extras if normalised(name) in machine]:
            needed_by = " and ".join(MACHINE)
            raise SystemExit(f"pack_gpu: --with {present[0]}: the machine has it, {needed_by} need it")
        wanted = resolved([pinned[normalised(name)] for name in extras], target)
        packed |= {name: line for name, line in wanted.items() if name not in machine}
    return list(packed.values())


def pip(*words: str) -> None:
    """Run pip; its errors are printed and end this program."""
    done = subprocess.run([*PIP, *words])
    if done.returncode:
        raise SystemExit(f"pack_gpu: pip {words[0]} ended with {done.returncode}")


def pack(folder: Path, packages: list[str], target: Target) -> None:
    """Fill `folder` with a wheel of each package, and of none else."""
    built = [line for line in packages if normalised(line.partition("==")[0]) in SOURCES]
    published = [line for line in packages if line not in built]
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), *built)
    pip("download", "--no-deps", "--dest", str(folder), *target.options(), *published)


def checkout_bytes() -> int:
    """Size of the files of this checkout that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    paths = {ROOT / name.decode() for name in names if name}
    return sum(path.stat().st_size for path in paths if path.is_file())


def read(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new or empty")
    parser.add_argument(
        "--with", dest="extras", action="append", default=[], metavar="NAME",
        help="another package of constraints.txt, with what it needs; may be repeated",
    )  # fmt: skip
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="newest tag of wheels that run there")
    parser.add_argument("--limit", type=float, default=60, metavar="MB", help="of the folder and the checkout together")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = read(words)
    folder: Path = options.folder
    if folder.exists() and any(folder.iterdir()):
        print(f"pack_gpu: {folder} is not empty", file=sys.stderr)
        return 2
    target = Target(python=options.python, platform=options.platform)
    packages = wheels(options.extras, target)
    folder.mkdir(parents=True, exist_ok=True)
    pack(folder, packages, target)
    return say_size(folder, options.limit)


def say_size(folder: Path, limit: float) -> int:
    """Print what travels and how it is installed; returns the exit code."""
    sizes = {path.name: path.stat().st_size / 1e6 for path in sorted(folder.rglob("*")) if path.is_file()}
    for name, size in sizes.items():
        print(f"{size:8.2f} MB  {name}")
    packed, checkout = sum(sizes.values()), checkout_bytes() / 1e6
    print(f"{packed:8.2f} MB  {folder}, {packed + checkout:.1f} MB with the files of this checkout")
    print(f"there: pip install --no-index --no-deps {folder}/*.whl")
    if packed + checkout > limit:
        print(f"pack_gpu: more than {limit:g} MB (--limit)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
