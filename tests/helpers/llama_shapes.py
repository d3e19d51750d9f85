"""Models of published shapes on the meta device, measured for a microbatch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import fp4train as f4
from fp4train.hardware import Device, Gpu
from fp4train.lab.costs.workload import Workload
from fp4train.models.common import tensor_cut
from fp4train.models.llama import Llama, LlamaModel
from fp4train.precision import Recipe, Timeline, find_layers, make_plan
from fp4train.run.state.moments import Moments
from fp4train.run.state.weights import ModelWeights

SHAPES = {
    "8B": Llama(width=4096, layers=32, heads=32, kv_heads=8, hidden=14336, tied=False),
    "70B": Llama(width=8192, layers=80, heads=64, kv_heads=8, hidden=28672, tied=False),
    "405B": Llama(width=16384, layers=126, heads=128, kv_heads=8, hidden=53248, tied=False),
    "Qwen2 7B": Llama(
        width=3584, layers=28, heads=28, kv_heads=4, hidden=18944, tied=False, qkv_bias=True
    ),
    "Qwen3 4B": Llama(
        width=2560,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        hidden=9728,
        tied=True,
        qk_norm=True,
    ),
}
"""Llama 3 (arXiv:2407.21783, table 3); Qwen2 (arXiv:2407.10671, table 1), Qwen3 (arXiv:2505.09388,
table 1).
"""

SEQ_LEN = 8192
STATES = {ModelWeights.title: 4.0, Moments.title: 8.0}
"""Bytes per parameter that a run with AdamW keeps."""


@cache
def model(name: str) -> LlamaModel:
    with torch.device("meta"):
        built = SHAPES[name].build(vocab_size=128256, seq_len=SEQ_LEN)
    converted = f4.convert(built)
    assert isinstance(converted, LlamaModel)
    return converted


def measured(name: str, recipe: Recipe, gpu: Gpu, **options: Any) -> Workload:
    """The workload of a model whose blocks all follow `recipe`, and whose layers each quantise x
    for themselves, as in software without groups of layers. The same one is measured once.

    Args:
        options: those of `workload`.
    """
    return workload(name, recipe, Device.elsewhere(gpu), **options)


@cache
def workload(
    name: str,
    recipe: Recipe,
    device: Device,
    *,
    sequences: int = 1,
    compiled: bool = True,
    backend: str = "auto",
    liger: bool = False,
    tensor: int = 1,
    logit_bytes: float = Workload.logit_bytes,
) -> Workload:
    """The workload on a device.

    Args:
        tensor: tensor-parallel ranks, each of which runs its parts on the backend of whole layers.
    """
    layers = find_layers(model(name)).values()
    cut = tensor_cut(model(name))
    timeline = Timeline(recipe=recipe, steps=1)
    tokens = sequences * SEQ_LEN
    plan = make_plan(layers, timeline, None, tokens=tokens, device=device, backend=backend)
    (stretch,) = plan.stretches
    parts = {
        name: replace(planned, layer=cut.part(planned.layer, tensor), readers=())
        for name, planned in stretch.layers.items()
    }
    return Workload(
        model=model(name),
        stretch=replace(stretch, layers=parts),
        sequences=sequences,
        seq_len=SEQ_LEN,
        states=STATES,
        compiled=compiled,
        liger=liger,
        logit_bytes=logit_bytes,
    )
