"""The one autograd function: whatever a planned layer multiplies is a node of it, and all that its
backward pass needs goes through autograd.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from linear_layers import layer, rand
from torch import Tensor, nn

from fp4train.nn import Experts, Linear
from fp4train.nn.engine import flatten, unflatten
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Delayed,
    OutlierChannels,
    Recipe,
    TetraJetV2,
    TetraJetV2Outliers,
    autocast,
)
from fp4train.quantize import QuantSpec, quantize


def nodes(y: Tensor) -> Iterator[str]:
    """Names of the nodes of autograd's graph below y that are no leaves."""
    waiting = [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and "AccumulateGrad" not in node.name():
            yield node.name()
            waiting += [below for below, _ in node.next_functions]


def experts() -> Experts:
    torch.manual_seed(1)
    return Experts(3, 32, 48, bias=True)


def summed_layer() -> Linear:
    made = layer()
    made.sum_gradients(True)
    return made


OUTLIERS = replace(
    TetraJetV2(),
    outliers=OutlierChannels(recipe=TetraJetV2Outliers(), share=0.25, multiple=8, start=0, steps=1),
)


@pytest.mark.parametrize(
    ("module", "recipe"),
    [
        (layer, NVFP4()),
        (layer, FP8Delayed()),
        (layer, OUTLIERS),
        (summed_layer, BF16()),
        (experts, MXFP8()),
        (experts, BF16()),
    ],
    ids=[
        "gemms",
        "delayed",
        "outlier channels",
        "sum in high precision",
        "experts",
        "experts high",
    ],
)
def test_what_a_layer_multiplies_is_one_node_of_the_one_function(
    module: Any, recipe: Recipe
) -> None:
    planned: nn.Module = module()
    x = rand(32, 32).bfloat16().requires_grad_()
    rows = ([16, 0, 12],) if isinstance(planned, Experts) else ()
    for step in range(3):
        with autocast(recipe, step=step):
            y = planned(x, *rows)
    assert [name for name in nodes(y) if "Function" in name] == ["LayerFunctionBackward"]


def test_the_group_keeps_through_autograd_what_its_backward_takes() -> None:
    """Packed by hooks, which see every tensor that an expert saves, gradients stay the same."""
    planned = experts()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    results = []
    for hooked in (False, True):
        x = rand(32, 32).bfloat16().requires_grad_()
        planned.zero_grad()
        with autocast(NVFP4(), step=0, token_offset=0):
            if hooked:
                with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
                    y = planned(x, [16, 0, 12])
            else:
                y = planned(x, [16, 0, 12])
        y.float().square().sum().backward()
        assert x.grad is not None and planned.weight.grad is not None
        results.append((y.detach(), x.grad, planned.weight.grad))
    assert len(packed) >= 5, "the weights, and codes and scales of two experts"
    assert all(map(torch.equal, *results))


def test_codes_tensors_and_nothing_come_back_as_they_were_saved() -> None:
    codes = quantize(
        rand(16, 32).bfloat16(), QuantSpec(element="e2m1", block=(1, 16), scale="e4m3")
    )
    w = rand(4, 4)
    tensors, kinds = flatten([w, None, codes, None, codes])
    back_w, nothing, back, also_nothing, again = unflatten(tensors, kinds)
    assert back_w is w and nothing is None and also_nothing is None
    assert back == codes and again == codes
