"""The estimate of a dequantised backward: codes of fprop are saved, and decoded for products in
BF16.
"""

from typing import Any

import pytest
import torch

import fp4train as f4
from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs.rows import layer_costs
from fp4train.lab.costs.workload import Workload
from fp4train.models.llama import Llama
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Block,
    LayerPolicy,
    Recipe,
    Timeline,
    find_layers,
    make_plan,
    resolve,
)

B200 = find_gpu("B200")
SEQUENCES = 2
TOKENS = 64


def estimated(recipe: Recipe, backend: str) -> Workload:
    shape = Llama(width=128, layers=1, heads=2, kv_heads=2, hidden=256)
    with torch.device("meta"):
        model = f4.convert(shape.build(vocab_size=64, seq_len=TOKENS), backend=backend)
    options: dict[str, Any] = {
        "tokens": SEQUENCES * TOKENS,
        "device": Device.elsewhere(B200),
        "backend": backend,
    }
    timeline = Timeline(recipe=recipe, steps=1)
    every_layer = LayerPolicy(first=0, last=0)
    plan = make_plan(find_layers(model).values(), timeline, every_layer, **options)
    return Workload(model=model, stretch=plan.at(0), sequences=SEQUENCES, seq_len=TOKENS, states={})


@pytest.mark.parametrize("backend", ["emulate", "te"])
@pytest.mark.parametrize("kind", [NVFP4, MXFP8, FP8Block], ids=lambda kind: kind.__name__)
def test_a_block_saves_as_many_bytes_as_with_a_quantised_backward(kind: Any, backend: str) -> None:
    saved = {
        recipe.name: estimated(recipe, backend).blocks[0].saved
        for recipe in (kind(), kind(backward="dequantised"), BF16())
    }
    quantised, dequantised, bf16 = saved.values()
    assert dequantised == quantised < bf16


@pytest.mark.parametrize("backend", ["emulate", "te"])
def test_dgrad_and_wgrad_cost_a_product_in_bf16_and_the_decoding(backend: str) -> None:
    recipe = NVFP4(backward="dequantised")
    layer = find_layers(torch.nn.Sequential(torch.nn.Linear(1024, 2048)))["0"]
    plan = resolve(layer, recipe, None, backend, Device.elsewhere(B200))
    rows = {row.gemm_name: row for row in layer_costs(plan, B200, 4096)}
    for gemm in ("dgrad", "wgrad"):
        assert rows[gemm].gemm == rows[gemm].bf16
        assert rows[gemm].quantise > 0
        assert rows[gemm].elements == "BF16·BF16"
        assert rows[gemm].emulated is None and not rows[gemm].loses
    if backend == "te":
        assert rows["fprop"].gemm < rows["fprop"].bf16
