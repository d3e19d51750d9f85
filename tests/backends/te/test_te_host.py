"""What the host does for a layer on TE's real Python, of which TE's own is a part
(te_host_on_cpu.py): the functions that fp4train adds, which a busy machine does not change.
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
MOST = 72
"""Calls of Python's functions besides those of TE's layer, forward and backward: a tenth more than
the 66 that were counted.
"""


@pytest.mark.parametrize(
    "recipe", [NVFP4(), MXFP8(), FP8Current(), FP8Delayed()], ids=lambda recipe: recipe.name
)
def test_a_layer_adds_few_calls_to_those_of_te(report: Any, recipe: Recipe) -> None:
    counts = report[recipe.name]
    assert counts and all(ours > theirs > plain > 0 for ours, theirs, plain in counts), counts
    assert max(ours - theirs for ours, theirs, _ in counts) <= MOST, counts
