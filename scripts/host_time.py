"""The host's time for a small layer, forward and backward, in µs, and for three layers that read one x: on torch's
products and Triton's quantisers, and on Transformer Engine; and for a pass of a block that is a CUDA graph:

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
from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe, autocast

ROOT = Path(__file__).resolve().parents[1]
ON_TE = ROOT / "tests" / "backends" / "te" / "te_host_on_cpu.py"
RECIPES = (NVFP4(), MXFP8(), FP8Current(), FP8Delayed())
OLDEST_TE = (2, 19)
"""Oldest version whose Python calls the kernels that are replaced."""


def measure(recipe: Recipe, tries: int) -> tuple[float, float]:
    """(µs of a layer, of an nn.Linear)."""
    gpu_stand_ins.helpers()
    from host_passes import least, native_layer, plain_layer, without_kernels

    with without_kernels(), autocast(recipe, step=0):
        layer, plain = native_layer(recipe), plain_layer()
        layer()
        pairs = [(least(layer), least(plain)) for _ in range(tries)]
    ours, theirs = map(min, zip(*pairs, strict=True))
    return 1e6 * ours, 1e6 * theirs


def measure_joint(tries: int) -> tuple[float, float]:
    """(µs of three layers that read one x as one product in MXFP8, of the same apart)."""
    gpu_stand_ins.helpers()
    from host_passes import least, three_layers, without_kernels

    with without_kernels():
        both = [three_layers(MXFP8(), "native", joint=joint) for joint in (True, False)]
        for each in both:
            each()
        pairs = [(least(both[0]), least(both[1])) for _ in range(tries)]
    joint, apart = map(min, zip(*pairs, strict=True))
    return 1e6 * joint, 1e6 * apart


def measure_graphs(tries: int) -> float:
    """µs of a pass of a recorded block, the mean of forward and backward, whose graph does nothing."""
    gpu_stand_ins.helpers()
    from host_passes import least
    from replayed_blocks import small_llama

    blocks = small_llama()
    return 1e6 * min(least(blocks.step, 10) for _ in range(tries)) / blocks.passes


def measure_on_te(tries: int) -> tuple[dict[str, tuple[float, float, float]], tuple[float, float]]:
    """(Recipe → (µs of a layer of fp4train on Transformer Engine, of its own layer, of an nn.Linear); those of three
    layers that read one x, as `measure_joint`).

    It is measured in a process of its own, in which Transformer Engine and torch take the CPU for a GPU.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(ON_TE), str(tries)]
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout)
    *layers, (joint, apart) = ([1e6 * min(each) for each in zip(*rows, strict=True)] for rows in found.values())
    return {name: (ours, theirs, plain) for name, (ours, theirs, plain) in zip(found, layers, strict=False)}, (
        joint,
        apart,
    )


def _joint(joint: float, apart: float) -> str:
    return (
        f"  three that read one x, MXFP8: {joint:.0f} µs as one product, apart {apart:.0f}, {joint / apart:.2f} of it"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10, help="times that each is measured")
    given = parser.parse_args(words)
    print("on torch's products and Triton")
    for recipe in RECIPES:
        ours, plain = measure(recipe, given.tries)
        above = f"above it {ours - plain:.0f}, {ours / plain:.1f} times"
        print(f"  {recipe.name:12} {ours:5.0f} µs, nn.Linear {plain:.0f}, {above}", flush=True)
    print(_joint(*measure_joint(given.tries)))
    print(f"graphs of blocks: {measure_graphs(given.tries):.0f} µs a pass, without the launch")
    print("on Transformer Engine")
    if (availability.version() or ()) < OLDEST_TE:
        found = availability.version_text() if availability.version() else "none"
        print(f"  not measured: {found} is installed, and {'.'.join(map(str, OLDEST_TE))} or newer is needed")
        return
    layers, joint = measure_on_te(given.tries)
    for name, (ours, theirs, plain) in layers.items():
        above = f"Transformer Engine's own {theirs:.0f}, above it {ours - theirs:.0f}"
        print(f"  {name:12} {ours:5.0f} µs, nn.Linear {plain:.0f}, {above}")
    print(_joint(*joint))


if __name__ == "__main__":
    main()
