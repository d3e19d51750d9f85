"""The host's time for a layer on TE's real Python, of which TE's own is a part (te_host_on_cpu.py).
What fp4train adds is compared with a small nn.Linear on the same thread, measured in turn: a busy
machine changes little.
"""

import importlib.util
import pathlib
from typing import Any

import pytest

from fp4train.backends.te import availability
from fp4train.precision import MXFP8, NVFP4, FP8Current, FP8Delayed, Recipe

if (availability.version() or ()) < (2, 19):
    pytest.skip("needs the transformer_engine wheel, 2.19 or newer", allow_module_level=True)
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

PROGRAM = pathlib.Path(__file__).with_name("te_host_on_cpu.py")
MOST = 2.0
"""Times that of an nn.Linear [8, 8], 20 µs: a third more than the 1.5 that were measured, and below
100 µs.
"""


@pytest.mark.parametrize(
    "recipe", [NVFP4(), MXFP8(), FP8Current(), FP8Delayed()], ids=lambda recipe: recipe.name
)
def test_a_layer_adds_little_of_the_host_to_that_of_te(report: Any, recipe: Recipe) -> None:
    found = report[recipe.name]
    assert len(found) > 1 and all(ours > theirs > plain for ours, theirs, plain in found), found
    assert min((ours - theirs) / plain for ours, theirs, plain in found) <= MOST, found
