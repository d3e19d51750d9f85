"""Pack what a GPU machine without a network lacks into a folder to carry there:

    python scripts/pack_gpu.py FOLDER [--python 3.12] [--kernels]

and there, beside a copy of this checkout:

    pip install --no-index --no-deps FOLDER/*.whl

A machine with torch, Triton and transformers lacks four wheels for a run with `track=jsonl`, which `WHEELS` names;
their versions are those of constraints.txt. What they need besides, the machine has, and pip must neither replace nor
ask for it there (--no-deps).

`--kernels` adds FOLDER/kernels.tgz: the Triton kernels that `gpu_check.sh --total` launches there, compiled here
without a GPU for each `--sm` (90 and 100), which `gpu_check.sh --kernels FOLDER/kernels.tgz` takes. Triton finds them
only where Python, Triton and this checkout are the same: `--compiler` is such a Python, with Triton and without torch.
Those of liger and of torch.compile are compiled there.

The last lines say how much travels: the folder, and the files of the checkout beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import gpu_packed

ROOT = Path(__file__).resolve().parents[1]

WHEELS = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "liger-kernel")
"""Packages that a training run imports and a machine with torch and transformers lacks."""

SOURCES = ("antlr4-python3-runtime",)
"""Packages without a wheel on PyPI. Theirs are built here: they hold Python alone, and fit every
machine.
"""

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def pins() -> dict[str, str]:
    """Package → "name==version", as constraints.txt pins it."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {line.partition("==")[0]: line for line in lines if "==" in line}


def pip(*words: str) -> None:
    """Run pip; its errors are printed and end this program."""
    done = subprocess.run([*PIP, *words])
    if done.returncode:
        raise SystemExit(f"pack_gpu: pip {words[0]} ended with {done.returncode}")


def pack(folder: Path) -> None:
    """Fill `folder` with the wheels, which hold Python alone and fit every machine."""
    pinned = pins()
    for name in WHEELS:
        if name in SOURCES:
            pip("wheel", "--no-deps", "--wheel-dir", str(folder), pinned[name])
        else:
            only = ("--no-deps", "--only-binary", ":all:")
            pip("download", *only, "--dest", str(folder), pinned[name])


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
    parser.add_argument("--python", default="3.12", help="version of Python there")
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
    program = options.compiler or f"python{options.python}"
    compiler = gpu_packed.Compiler(program=program, python=options.python, triton=options.triton)
    if options.kernels and (reason := compiler.why_not()) is not None:
        print(f"pack_gpu: --kernels: {reason}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    pack(folder)
    if options.kernels:
        gpu_packed.pack(folder, sorted(set(options.sm or gpu_packed.PROCESSORS)), compiler)
    return say_size(folder, options.limit)


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
