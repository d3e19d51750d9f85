"""Data-parallel ranks that train in FP8 with delayed scaling keep the same histories."""

import pytest
import torch
import torch.distributed as dist
from forked import forked_ranks

import fp4train as f4
from fp4train.precision import FP8Delayed


@pytest.mark.long
def test_delayed_scaling_takes_the_largest_amax_of_all_ranks() -> None:
    def on_rank() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        layer = f4.convert(torch.nn.Linear(16, 16))
        for step in range(3):
            # the second rank sees the larger values
            x = torch.full((8, 16), float(1 + 10 * rank + step))
            with f4.autocast(FP8Delayed(history=4), step=step):
                y = layer(x)
            y.sum().backward()
        history = layer.states["scaling"].state()["history.x"].tolist()
        assert history == [13.0, 12.0, 11.0, 0.0]
        dist.destroy_process_group()

    assert forked_ranks(2, on_rank) == [0, 0]
