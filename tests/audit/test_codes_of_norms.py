"""Audits of layers whose operands a norm or gate makes in codes: what they are made of is kept, and
not the tensor in their place.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import interpreted
from needs_triton import needs_triton
from torch import Tensor, nn

import fp4train as f4
from fp4train.audit import Observer
from fp4train.audit.whole_layers import observed_backend_layer
from fp4train.nn import KernelNorm, LayerFunction, Linear, MadeForms, fused_norm, gated_mlp
from fp4train.nn.fused_norm import parameters_of
from fp4train.nn.gated_mlp import GatedCall
from fp4train.precision import NVFP4
from fp4train.quantize import SourceTensors, produced

SHAPES = ((64, 96), (64, 96), (96, 64))
"""In and out features of gate, up and down."""


def forms_of(
    values: tuple[Tensor, ...], reader: Any, tensor: str, calls: Sequence[Any]
) -> list[Any]:
    operand = getattr(reader, tensor)
    return [
        operand.prepare(value, call, True, True) for value, call in zip(values, calls, strict=True)
    ]


def fill(source: SourceTensors) -> None:
    """Fill 1/√(mean + ε), which the kernel of a norm does."""
    if source.kind == "norm":
        h, _, rstd_M = source.tensors
        rstd_M.copy_((h.float().square().mean(1) + source.eps).rsqrt())


def forms_by_torch(source: SourceTensors, *arguments: Any) -> list[Any]:
    """As `forms_from`, from values that torch computes."""
    fill(source)
    return forms_of(source.values(), *arguments)


def forms_of_half(source: SourceTensors, *arguments: Any) -> list[Any]:
    """As those of kernels that take half of their first tensor."""
    fill(source)
    halved = (source.tensors[0] / 2, *source.tensors[1:])
    return forms_of(source._replace(tensors=halved).values(), *arguments)


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


def trained(layers: nn.Sequential) -> None:
    """A pass of a norm, gate, up and down, whose codes are made where norm and gate are."""
    x, weight_K = inputs()
    with f4.autocast(NVFP4(), seed=1, step=2):
        calls = calls_of(layers, x)
        norm = KernelNorm("norm", 1e-5, calls[0].executor)
        call = GatedCall(norm, calls[:2], calls[2])
        y, _ = LayerFunction.apply(call, x, None, weight_K, *parameters_of(layers))  # type: ignore[no-untyped-call,arg-type]
    y.float().square().mean().backward()


def use(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    """Let torch compute what the kernels of norms and gates do."""
    for module in (fused_norm, gated_mlp):
        monkeypatch.setattr(module, "forms_from", kernels)

    def norm_backward(dy_MK: Tensor, h_MK: Tensor, weight_K: Tensor, *_: Any, **__: Any) -> Any:
        return dy_MK, torch.zeros_like(weight_K)

    monkeypatch.setattr(produced, "norm_backward", norm_backward)


def test_tensors_whose_codes_a_norm_or_a_gate_makes_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, forms_by_torch)
    layers = converted(*SHAPES)
    with f4.audit(layers) as report:
        trained(layers)
    assert not report.faults, str(report)
    assert [list(audit.gemms) for audit in report.audits] == [["fprop", "dgrad", "wgrad"]] * 3
    assert not any(audit.uncovered for audit in report.audits)


def test_wrong_codes_of_a_norm_or_a_gate_are_found_at_their_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, forms_of_half)
    layers = converted(*SHAPES)
    with f4.audit(layers) as report:
        trained(layers)
    operands = {(fault.layer, fault.gemm, fault.operand) for fault in report.faults}
    of_x = {(name, gemm, "x") for name in "012" for gemm in ("fprop", "wgrad")}
    of_dy = {(name, gemm, "dy") for name in "01" for gemm in ("dgrad", "wgrad")}
    assert operands == of_x | of_dy


def test_a_pass_that_nobody_audits_keeps_no_gradient_beside_its_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, forms_by_torch)
    kept: list[str] = []

    class Noted(MadeForms):
        def __init__(self, forms: Any, source: SourceTensors | None = None, *more: Any) -> None:
            kept.extend([] if source is None else [source.kind])
            super().__init__(forms, source, *more)

    monkeypatch.setattr(gated_mlp, "MadeForms", Noted)
    trained(converted(*SHAPES))
    assert kept == ["gate"]  # its tensors are saved for backward anyway


PROGRAM = """
import json
import native_on_cpu
import torch
import fp4train as f4
from fp4train.config import TrainSettings
from fp4train.models.llama import Llama
from fp4train.nn import weight_form, weights
from fp4train.precision import NVFP4, LayerPolicy, autocast
from fp4train.run.fuse import fuse

native_on_cpu.install()
native_on_cpu.quantise_by("triton")
native_on_cpu.quantise_by("auto", weight_form, weights)  # the interpreter takes long
torch.manual_seed(0)
shape = Llama(width=64, heads=4, kv_heads=2, hidden=96, tied=False, layers=1)
model = f4.convert(shape.build(vocab_size=60, seq_len=16), backend="native").train()
settings = TrainSettings(steps=1, batch_size=2, microbatch=None, seq_len=16, kernels="auto")
fuse(model, settings, "cpu")
tokens = torch.randint(60, (2, 16))
with f4.audit(model) as report:
    with autocast(NVFP4(), policy=LayerPolicy(last=0), step=3):
        loss = model(tokens, tokens.flip(1))
    loss.backward()
audits = [[list(audit.gemms), list(audit.uncovered)] for audit in report.audits]
made = native_on_cpu.launched["quantize_produced"]
print(json.dumps([made, [str(fault) for fault in report.faults], audits]))
"""


@pytest.mark.long
@needs_triton
def test_kernels_of_norms_and_gates_pass_an_audit() -> None:
    ended = interpreted("-c", PROGRAM)
    assert ended.returncode == 0, ended.stderr
    made, faults, audits = json.loads(ended.stdout.splitlines()[-1])
    assert made and not faults
    assert audits == [[["fprop", "dgrad", "wgrad"], []]] * 7


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
