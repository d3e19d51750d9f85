"""torch.compile of functions that enter `autocast`, by the interface that the installed torch has
for contexts.
"""

import subprocess
import sys

import pytest

REGIONS = """
import logging
import torch
import fp4train as f4
from fp4train.precision import MXFP8, NVFP4

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("torch").addHandler(handler)

model = f4.convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)))

def one_region(x, step):
    with f4.autocast(NVFP4(), step=step, token_offset=0):
        return model(2 * x).sum()

def nested_regions(x, step):
    with f4.autocast(MXFP8(), step=step, token_offset=0):
        y = model(x).sum()
        with f4.autocast(NVFP4(), step=step, token_offset=0, enabled=False):
            y = y + model(x).sum()
    return y + model(x).sum()

@f4.autocast(NVFP4(), step=3, token_offset=0)
def decorated(x, step):
    return model(x).sum() + step

class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, x, step):
        with f4.autocast(MXFP8(), step=step, token_offset=0):
            return self.model(x).sum()

x = torch.randn(16, 32, requires_grad=True)
for function in (one_region, nested_regions, decorated, Module()):
    compiled = torch.compile(function, backend="aot_eager")
    for step in range(3):
        results = []
        for called in (compiled, function):
            x.grad = model[0].weight.grad = None
            y = called(x, step)
            y.backward()
            results.append((y.detach(), x.grad, model[0].weight.grad))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results)), (function, step)
        assert f4.precision.context.current() is None
deprecated = [message for message in messages if "deprecated" in message]
assert not deprecated, deprecated
print("equal")
"""


@pytest.mark.long
def test_functions_that_enter_autocast_have_the_bits_of_eager_mode_and_use_nothing_deprecated() -> (
    None
):
    """One after the other in a process, as the first one makes contexts inputs of graphs for those
    after it.
    """
    command = [sys.executable, "-W", "ignore", "-c", REGIONS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr
    assert "deprecated" not in run.stderr, run.stderr
