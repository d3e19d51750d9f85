"""One product of several layers that read one x: the one layer of their size, and the copies that join operands.

What is joined lies apart before: dy of each layer, unless it lies so where it is made, and the forms of the weights,
which lie in one piece of memory where a backend runs the layers as one.
"""

from collections.abc import Mapping
from dataclasses import replace

from fp4train.hardware import Gpu, stored_bytes
from fp4train.lab.costs.roofline import COPY, decoded_width, move_seconds
from fp4train.precision.layer_plan import Gemm, LayerPlan
from fp4train.precision.layers import Layer
from fp4train.quantize import QuantSpec


def joined_layer(plan: LayerPlan, others: Mapping[str, LayerPlan]) -> Layer:
    """All layers that `plan` may be multiplied with, itself included, as one with the out features of all."""
    features = sum(others[name].layer.out_features for name in plan.readers if name in others)
    return replace(plan.layer, out_features=max(features, plan.layer.out_features))


def joining_seconds(
    gpu: Gpu,
    plan: LayerPlan,
    gemm: Gemm,
    joined: Layer,
    tokens: int,
    microbatches: int,
    weight_joins: float,
    dy_is_joined: bool,
) -> float:
    """Seconds of a step to join the operands of `gemm`, one product of the layers that `joined` stands for: dy, once
    for dgrad and wgrad, and the weights.

    Args:
        weight_joins: how often a step joins the weights.
        dy_is_joined: whether dy lies in one piece of memory where it is made.
    """
    seconds, width = 0.0, plan.table.torch_dtype.itemsize
    if gemm.name != "fprop" and not dy_is_joined:
        copy = move_seconds(gpu, 2 * width * tokens * joined.out_features, COPY)
        seconds += microbatches * copy / (plan.dgrad.joint + plan.wgrad.joint)
    if gemm.name != "wgrad" and plan.layer_backend is None:
        spec = gemm.operands.second
        form = width if spec is None else _written(spec, gemm.backend)
        seconds += weight_joins * move_seconds(gpu, 2 * form * joined.weights, COPY)
    return seconds


def _written(spec: QuantSpec, backend: str) -> float:
    """Bytes of a quantised element as a backend of single GEMMs multiplies it."""
    if backend != "native":
        return decoded_width(spec)
    return stored_bytes(spec.element.upper(), spec.block[1] or 32)
