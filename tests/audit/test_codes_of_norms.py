"""Audits of layers whose operands a norm or gate makes: the stream in their place is not what they
multiply.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp4train as f4
from fp4train.audit import Observer
from fp4train.audit.whole_layers import observed_backend_layer
from fp4train.nn import LayerFunction, Linear, gated_mlp
from fp4train.nn.fused_norm import NormedCall, parameters_of
from fp4train.nn.gated_mlp import GatedCall
from fp4train.precision import NVFP4

CODES = "a norm or a gate makes its codes"


class ShiftedNorm:
    """n = h + 1, given as both forms of a layer's x."""

    def __init__(self, executor: Any, call: Any) -> None:
        self.executor = executor
        self.call = call

    def codes(self, x: Tensor, change: None, weight_K: Tensor) -> tuple[Any, Tensor, Tensor]:
        forms = self.executor.x.prepare(x.detach() + 1, self.call, True, True)
        return forms, x.detach(), x.new_ones(len(x))

    def backward(
        self, dn: Tensor, h: Tensor, weight_K: Tensor, rstd_M: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return dn, torch.zeros_like(weight_K)


def forms_of_gate(source: Any, reader: Any, tensor: str, calls: Any) -> list[Any]:
    """As `forms_from`, by torch."""
    *gradient, gate, up = [part.detach().float().requires_grad_() for part in source.tensors]
    with torch.enable_grad():
        h = F.silu(gate) * up
    results = [h]
    if gradient:
        results = list(torch.autograd.grad(h, (gate, up), gradient[0].detach()))
    operand = getattr(reader, tensor)
    return [
        operand.prepare(result.detach().bfloat16(), call, True, True)
        for result, call in zip(results, calls, strict=True)
    ]


def calls_of(layers: nn.Sequential, x: Tensor) -> list[Any]:
    """The call of each layer, whose executor is observed where the layer is."""
    calls = []
    for layer in layers:
        assert isinstance(layer, Linear)
        executor, now = layer.executor_now(x.device, x.dtype)
        assert executor is not None
        calls.append(layer.call_in(now, executor, len(x), placed=True))
    return calls


def converted(*shapes: tuple[int, int]) -> nn.Sequential:
    torch.manual_seed(0)
    return f4.convert(nn.Sequential(*[nn.Linear(*shape, bias=False) for shape in shapes]))


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.ones(64, dtype=torch.bfloat16, requires_grad=True)


def test_the_stream_that_a_norm_reads_is_not_taken_for_the_x_of_its_layers() -> None:
    layers = converted((64, 96), (64, 96))
    x, weight_K = inputs()
    with f4.audit(layers) as report, f4.autocast(NVFP4(), seed=1, step=2):
        calls = calls_of(layers, x)
        norm: Any = ShiftedNorm(calls[0].executor, calls[0])
        call = NormedCall(norm, calls)
        *ys, _ = LayerFunction.apply(call, x, None, weight_K, *parameters_of(layers))  # type: ignore[no-untyped-call,arg-type]
        sum(y.float().square().mean() for y in ys).backward()
    assert not report.faults, str(report)
    assert [list(audit.gemms) for audit in report.audits] == [["fprop", "dgrad", "wgrad"]] * 2
    assert {reason for audit in report.audits for reason in audit.uncovered} == {
        f"fprop, operand x: {CODES}",
        f"wgrad, operand x: {CODES}",
    }


def test_tensors_in_the_place_of_what_a_gate_quantises_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gated_mlp, "forms_from", forms_of_gate)
    layers = converted((64, 96), (64, 96), (96, 64))
    x, weight_K = inputs()
    with f4.audit(layers) as report, f4.autocast(NVFP4(), seed=1, step=2):
        calls = calls_of(layers, x)
        norm: Any = ShiftedNorm(calls[0].executor, calls[0])
        call = GatedCall(norm, calls[:2], calls[2])
        y, _ = LayerFunction.apply(call, x, None, weight_K, *parameters_of(layers))  # type: ignore[no-untyped-call,arg-type]
        y.float().square().mean().backward()
    assert not report.faults, str(report)
    uncovered = {audit.layer: set(audit.uncovered) for audit in report.audits}
    of_x = {f"fprop, operand x: {CODES}", f"wgrad, operand x: {CODES}"}
    of_dy = {f"dgrad, operand dy: {CODES}", f"wgrad, operand dy: {CODES}"}
    assert uncovered == {"0": of_x | of_dy, "1": of_x | of_dy, "2": of_x}


class Codes(Tensor):
    """A backend's tensor of codes."""


def test_a_layer_of_a_backend_that_gets_codes_alone_is_not_covered() -> None:
    (layer,) = converted((64, 64))
    assert isinstance(layer, Linear)
    observer = Observer(layer)
    executor: Any = SimpleNamespace(multiplied=lambda x, *_: x)
    observed: Any = observed_backend_layer(executor, observer)
    codes = torch.zeros(4, 64).as_subclass(Codes)
    assert observed.multiplied(codes, layer.weight, None, None, 0) is codes
    assert observer.uncovered is not None and "codes alone" in observer.uncovered
    assert type(observed) is type(copy.copy(executor))
