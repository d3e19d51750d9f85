"""Plans whose fprop has products of residuals, in records."""

import json

from torch import nn

import fp4train as f4
from fp4train.precision import NVFP4, LayerPolicy, Residual
from fp4train.quantize import QuantSpec
from fp4train.run.record.stretches import compact, expanded


def test_products_of_residuals_are_recorded_as_fprop() -> None:
    residual = Residual(tensors=("x", "w"), spec=QuantSpec(), share=0.25)
    plan = f4.plan(nn.Sequential(nn.Linear(64, 64)), NVFP4(residual=residual), LayerPolicy(last=0))
    stretch = expanded(json.loads(json.dumps(compact(plan)))[0])
    assert [gemm for _, gemm, *_ in stretch.rows] == ["fprop", "dgrad", "wgrad", "fprop", "fprop"]
