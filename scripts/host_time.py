"""The host's time for a small layer, forward and backward, on torch's products and Triton's quantisers, in µs:

    python scripts/host_time.py

Kernels take no time: launches and products do nothing but allocate (tests/helpers/host_passes.py), so that no GPU is
needed. Each figure is the least of many, of one thread, beside that of an nn.Linear that is measured in turn.
"""

from __future__ import annotations

import argparse

import gpu_stand_ins

from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe, autocast

RECIPES = (NVFP4(), MXFP8(), FP8Current(), FP8Delayed())


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


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10, help="times that both are measured")
    given = parser.parse_args(words)
    for recipe in RECIPES:
        ours, plain = measure(recipe, given.tries)
        above = f"above it {ours - plain:.0f}, {ours / plain:.1f} times"
        print(f"{recipe.name:12} {ours:5.0f} µs, nn.Linear {plain:.0f}, {above}", flush=True)


if __name__ == "__main__":
    main()
