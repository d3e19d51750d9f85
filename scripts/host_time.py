"""The host's time for a small layer, forward and backward, in µs: on torch's products and Triton's
quantisers, and on Transformer Engine:

    python scripts/host_time.py

Kernels take no time: launches and products do nothing but allocate (tests/helpers/host_passes.py), so that no GPU is
needed. Each figure is the least of many, of one thread, beside that of an nn.Linear that is measured in turn, and of
Transformer Engine's own layer, called as a loop that trains on it calls it. Its Python is the installed one; its
kernels do nothing, like the others (tests/backends/te/te_host_on_cpu.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_stand_ins

from fp4train.backends.te import availability
from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe

ROOT = Path(__file__).resolve().parents[1]
ON_TE = ROOT / "tests" / "backends" / "te" / "te_host_on_cpu.py"
RECIPES = (NVFP4(), MXFP8(), FP8Current(), FP8Delayed())
OLDEST_TE = (2, 19)
"""Oldest version whose Python calls the kernels that are replaced."""


def measure(recipe: Recipe, tries: int) -> tuple[float, float]:
    """(µs of a layer, of an nn.Linear)."""
    gpu_stand_ins.helpers()
    from host_passes import least, microbatches, native_layer, plain_layer, without_kernels

    with without_kernels(), microbatches(recipe):
        layer = native_layer(recipe)
        plain = plain_layer()
        layer()
        pairs = [(least(layer), least(plain)) for _ in range(tries)]
    ours, theirs = map(min, zip(*pairs, strict=True))
    return 1e6 * ours, 1e6 * theirs


def measure_on_te(tries: int) -> dict[str, tuple[float, float, float]]:
    """Recipe → (µs of a layer of fp4train on Transformer Engine, of its own layer, of an
    nn.Linear).

    It is measured in a process of its own, in which Transformer Engine and torch take the CPU for a
    GPU.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(ON_TE), str(tries)]
    printed = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    times: dict[str, tuple[float, float, float]] = {}
    for name, rows in json.loads(printed.stdout).items():
        ours, theirs, plain = (1e6 * min(column) for column in zip(*rows, strict=True))
        times[name] = (ours, theirs, plain)
    return times


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=10, help="times that each is measured")
    given = parser.parse_args(words)
    print("on torch's products and Triton")
    for recipe in RECIPES:
        ours, plain = measure(recipe, given.tries)
        above = f"above it {ours - plain:.0f}, {ours / plain:.1f} times"
        print(f"  {recipe.name:12} {ours:5.0f} µs, nn.Linear {plain:.0f}, {above}", flush=True)
    print("on Transformer Engine")
    if (availability.version() or ()) < OLDEST_TE:
        found = availability.version_text() if availability.version() else "none"
        print(
            f"  not measured: {found} is installed, and {'.'.join(map(str, OLDEST_TE))} or "
            "newer is needed"
        )
        return
    for name, (ours, theirs, plain) in measure_on_te(given.tries).items():
        above = f"Transformer Engine's own {theirs:.0f}, above it {ours - theirs:.0f}"
        print(f"  {name:12} {ours:5.0f} µs, nn.Linear {plain:.0f}, {above}")


if __name__ == "__main__":
    main()
