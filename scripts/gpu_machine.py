"""What this machine is, as one line of JSON: its GPU, driver, and versions.

    python scripts/gpu_machine.py

Exit code 1: a package is absent that all checks need; 3: torch sees no GPU. Then the last line says which or so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys

import gpu_runs

NEEDED = ("torch", "triton", "numpy", "yaml", "safetensors", "tqdm", "hydra", "omegaconf")
"""Modules that a check imports."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(words)
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"{', '.join(absent)} not installed: scripts/pack_gpu.py packs what a machine lacks")
        return 1
    machine = gpu_runs.machine()
    if machine["gpu"] is None:
        print(f"torch {machine['torch']} sees no GPU")
        return 3
    print(json.dumps(machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
