"""Data-parallel ranks that train in FP8 with delayed scaling keep the same histories."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
import torch.distributed as dist
import fp4train as f4
from fp4train.precision import FP8Delayed

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
layer = f4.convert(torch.nn.Linear(16, 16))
for step in range(3):
    x = torch.full((8, 16), float(1 + 10 * rank + step))  # the second rank sees the larger values
    with f4.autocast(FP8Delayed(history=4), step=step):
        y = layer(x)
    y.sum().backward()
print(layer.states["scaling"].state()["history.x"].tolist())
dist.destroy_process_group()
"""


@pytest.mark.long
def test_delayed_scaling_takes_the_largest_amax_of_all_ranks(tmp_path) -> None:  # type: ignore[no-untyped-def]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    histories = [process.communicate(timeout=120)[0].strip() for process in ranks]
    assert histories == ["[13.0, 12.0, 11.0, 0.0]"] * 2
