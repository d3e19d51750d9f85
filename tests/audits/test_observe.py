"""Which call of a step an observer keeps."""

from __future__ import annotations

import torch
from torch import nn

import fp4train as f4
from fp4train.audits.observe import Observer
from fp4train.nn import Experts, Linear
from fp4train.precision import NVFP4

TOKENS = 64


def test_a_layer_that_is_called_twice_in_a_microbatch_is_kept_in_the_one_asked_for() -> None:
    (layer,) = f4.convert(nn.Sequential(nn.Linear(64, 64)))
    assert isinstance(layer, Linear)
    observer = layer.observer = Observer(layer, 1)
    for microbatch in range(2):
        x = torch.randn(TOKENS, 64)
        with f4.autocast(NVFP4(), seed=1, step=2, token_offset=microbatch * TOKENS):
            y = layer(layer(x))
        y.sum().backward()
    (record,) = observer.records
    assert record.complete
    assert record.position is not None and record.position.token == TOKENS


def test_an_expert_that_rests_in_a_microbatch_is_kept_in_the_one_asked_for() -> None:
    experts = Experts(2, 64, 96)
    observer = experts.observer = Observer(experts, 1)
    for microbatch, counts in enumerate([[TOKENS, 0], [0, TOKENS], [0, TOKENS]]):
        x = torch.randn(TOKENS, 64).bfloat16().requires_grad_()
        with f4.autocast(NVFP4(), seed=1, step=2, token_offset=microbatch * TOKENS):
            y = experts(x, counts)
        y.float().square().mean().backward()
    (record,) = observer.records
    assert record.name == "experts.1" and record.complete
    assert record.position is not None and record.position.token == TOKENS
