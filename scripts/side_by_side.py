"""Two checkouts side by side: user CPU seconds of the import, of `fp4train plan` and of a linear layer.

    python scripts/side_by_side.py OLD NEW [times=11]

Each command runs in a process of its own, the two checkouts in turn, so that a load of the machine meets both alike;
the numbers are medians. The last command is the import and 200 forward and backward passes of 512 tokens.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

LAYER = """
import torch, fp4train as f4
from fp4train.nn import Linear
from fp4train.precision import NVFP4
torch.set_num_threads(1)
layer, x = Linear(256, 256), torch.randn(512, 256, requires_grad=True)
for step in range(200):
    with f4.autocast(NVFP4(), step=step):
        y = layer(x)
    y.backward(torch.ones_like(y))
"""
COMMANDS = {
    "import fp4train": ("-c", "import fp4train"),
    "fp4train plan": ("-m", "fp4train", "plan"),
    "a linear layer": ("-c", LAYER),
}


def seconds(checkout: Path, command: tuple[str, ...]) -> float:
    """User CPU seconds of a command that finds the package in `checkout`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    subprocess.run(
        [sys.executable, *command], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    old, new, *rest = sys.argv[1:]
    times = int(rest[0].removeprefix("times=")) if rest else 11
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(times):
        for name, command in COMMANDS.items():
            for which, checkout in (("old", old), ("new", new)):
                found[name, which].append(seconds(Path(checkout), command))
    print(f"{'user CPU seconds':20}{'old':>8}{'new':>8}{'new/old':>9}")
    for name in COMMANDS:
        one, two = (statistics.median(found[name, which]) for which in ("old", "new"))
        print(f"{name:20}{one:8.3f}{two:8.3f}{two / one:9.3f}")


if __name__ == "__main__":
    main()
