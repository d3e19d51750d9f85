"""Collect the wheels that a GPU machine without a network lacks, into one folder to carry there.

    python scripts/pack_gpu.py FOLDER [--python 3.12] [--platform manylinux_2_28_x86_64] [--with datasets]

and there:

    pip install --no-index --no-deps FOLDER/*.whl

PyTorch's and NVIDIA's images bring torch, numpy and Triton; those are not packed, nor is hf-xet, which only
downloads, so pip must not ask for it (--no-deps). antlr4-python3-runtime, which
omegaconf needs, is published as a source archive only: its wheel is built here, for every Python. datasets is packed
where it is asked for: with pyarrow it takes 68 MB, and a machine without a network has nothing to load by it. The
folder must stay below `--limit` MB; the largest wheels are named with their sizes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BROUGHT = ("torch", "numpy")
"""Of the dependencies, what the images bring; the wheels that need them are packed without them."""

LEFT_OUT = ("datasets",)
"""Packed only where asked for."""

FROM_SOURCE = "antlr4-python3-runtime==4.9.3"
UNUSED = re.compile(r"(nvidia_|torch-|numpy-|triton-|cuda_|hf_xet-)", re.IGNORECASE)
"""Wheels that dependencies of dependencies bring along, and that are there or not used without a network."""


def requirements(also: set[str]) -> list[str]:
    """The project's dependencies and liger's kernels, but for what the images bring and what is left out."""
    if unknown := also - set(LEFT_OUT):
        raise SystemExit(f"pack_gpu: --with {', '.join(sorted(unknown))}: only {', '.join(LEFT_OUT)} is left out")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = [*project["dependencies"], *project["optional-dependencies"]["liger"]]
    names = {line: re.split(r"[<>=~!\[; ]", line)[0] for line in found}
    return [line for line, name in names.items() if name not in {*BROUGHT, *LEFT_OUT} - also]


def commands(folder: Path, wanted: list[str], python: str, platform: str) -> list[list[str]]:
    """What is run: build the one wheel, then download the others for the machine that they are for."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), FROM_SOURCE]
    target = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    platforms = [word for each in platforms_of(platform) for word in ("--platform", each)]
    download = [*pip, "download", "--dest", str(folder), "--find-links", str(folder), *target, *platforms, *wanted]
    return [build, download]


def platforms_of(newest: str) -> list[str]:
    """manylinux_2_28_x86_64 and the older ones, which run there too."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", newest)
    if found is None:
        return [newest]
    older = [f"manylinux_2_{minor}_{found[2]}" for minor in range(int(found[1]), 4, -1)]
    return [*older, f"manylinux2014_{found[2]}", f"manylinux2010_{found[2]}", f"manylinux1_{found[2]}"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="newest platform tag that runs there")
    parser.add_argument("--with", dest="also", action="append", default=[], metavar="PACKAGE", help="datasets")
    parser.add_argument("--limit", type=float, default=60, help="MB that the folder may hold")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run")
    args = parser.parse_args(arguments)
    wanted = requirements(set(args.also))
    steps = commands(args.folder, wanted, args.python, args.platform)
    if args.dry_run:
        print("\n".join(" ".join(step) for step in steps))
        return 0
    if args.folder.exists() and any(args.folder.iterdir()):
        print(f"pack_gpu: {args.folder} is not empty", file=sys.stderr)
        return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        subprocess.run(step, check=True)
    for wheel in args.folder.iterdir():
        if UNUSED.match(wheel.name):
            wheel.unlink()
    sizes = sorted(((each.stat().st_size / 1e6, each.name) for each in args.folder.iterdir()), reverse=True)
    total = sum(size for size, _ in sizes)
    print(f"{len(sizes)} wheels, {total:.1f} MB; the largest: " + ", ".join(f"{n} {s:.1f}" for s, n in sizes[:4]))
    print(f"pip install --no-index --no-deps {args.folder}/*.whl")
    if total > args.limit:
        print(f"pack_gpu: more than {args.limit:g} MB (--limit)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
