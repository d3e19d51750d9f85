"""Audits of linear layers that `convert` did not make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4train as f4
from fp4train.precision import NVFP4

GEMMS = ["fprop", "dgrad", "wgrad"]


class Tied(nn.Module):
    """Three layers of other code, of which two share a weight; x has two readers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32, dtype=dtype)
        self.second = nn.Linear(32, 32, bias=False, dtype=dtype)
        self.third = nn.Linear(32, 32, dtype=dtype)
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.first(x)) + self.second(x)
        y: torch.Tensor = self.third(h)
        return y


def gradients(model: nn.Module, dtype: torch.dtype, autocast: bool) -> list[torch.Tensor]:
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["fp32", "bf16", "autocast"],
)
def test_layers_of_torch_are_audited_and_keep_their_bits(
    dtype: torch.dtype, autocast: bool
) -> None:
    plain = gradients(Tied(dtype), dtype, autocast)
    model = Tied(dtype)
    parameters = dict(model.named_parameters())
    with f4.audit(model) as report:
        audited = gradients(model, dtype, autocast)
    assert not report.faults and not report.uncovered, str(report)
    names = ("first", "second", "third")
    seen = {result.layer: list(result.gemms) for result in report.audits}
    partly = [reason for result in report.audits for reason in result.uncovered]
    if autocast:  # x is a leaf, and the weights are
        assert seen == {"first": ["fprop"], "second": ["fprop"], "third": ["fprop", "dgrad"]}
        assert len(partly) == 5 and all("of all readers of a" in reason for reason in partly)
        assert str(report).count("partly covered: ") == 3
        assert "  partly covered: third: wgrad: torch.autocast adds up dw" in str(report)
    else:
        assert seen == dict.fromkeys(names, GEMMS) and not partly
    assert all(torch.equal(a, b) for a, b in zip(plain, audited, strict=True))
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_product_of_torchs_layer_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    right = F.linear

    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return right(x, w, bias) * (1.02 if bias is None else 1.0)

    monkeypatch.setattr(F, "linear", linear)
    with f4.audit(model) as report:
        gradients(model, torch.float32, False)
    assert {fault.layer for fault in report.faults} == {"second"}
    assert "multiplied by 1.02" in str(report)


def test_converted_layers_and_others_are_audited_together() -> None:
    model = nn.Sequential(f4.convert(nn.Sequential(nn.Linear(32, 32))), nn.Linear(32, 32))
    with f4.audit(model) as report, f4.autocast(NVFP4(), seed=1, step=2):
        model(torch.randn(32, 32)).square().mean().backward()
    assert not report.faults, str(report)
    assert [result.layer for result in report.audits] == ["0", "1"]


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_linear_layer_of_another_class_is_named_with_its_reason() -> None:
    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8, dtype=torch.float64))
    with f4.audit(model) as report:
        model[1](model[0](torch.randn(4, 8)).double()).sum().backward()
    assert "does not know what a Scaled computes" in report.uncovered["0"]
    assert "torch.float64" in report.uncovered["1"]
    assert not report.audits


def test_a_layer_of_transformer_engine_is_named_as_not_covered() -> None:
    class Linear(nn.Module):
        in_features = 8

    Linear.__module__ = "transformer_engine.pytorch.module.linear"
    with f4.audit(nn.Sequential(Linear(), nn.Linear(8, 8))) as report:
        pass
    assert "does not know what a Linear computes" in report.uncovered["0"]


def test_a_pass_that_raises_leaves_the_layer_as_it_was() -> None:
    layer = nn.Linear(8, 8)
    weight = layer.weight
    with f4.audit(layer) as report, pytest.raises(RuntimeError):
        layer(torch.randn(4, 9))
    assert layer.weight is weight and not report.audits


def test_a_layer_that_learns_nothing_has_no_backward_pass_to_be_seen() -> None:
    layer = nn.Linear(8, 8).requires_grad_(False)
    with f4.audit(layer) as report:
        layer(torch.randn(4, 8))
    assert not report.uncovered and [list(audit.gemms) for audit in report.audits] == [["fprop"]]


def test_one_layer_in_turn_is_audited_every_so_many_steps() -> None:
    model = Tied()
    audited = []
    for step in range(12):
        with f4.audit(model, every=3, step=step) as report:
            gradients(model, torch.float32, False)
        audited.append([result.layer for result in report.audits])
        assert not report.faults
    assert [names for names in audited if names] == [["third"], ["first"], ["third"], ["second"]]
    assert all(bool(names) == (step % 3 == 1) for step, names in enumerate(audited))
    with pytest.raises(ValueError, match="beside the number of the step"), f4.audit(model, every=3):
        pass


def test_a_hook_of_others_that_changes_what_a_layer_returns_is_no_fault() -> None:
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda module, arguments, y: 2 * y)
    with f4.audit(layer) as report:
        layer(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
    assert not report.faults, str(report)
    assert [list(result.gemms) for result in report.audits] == [GEMMS]


def test_a_layer_whose_passes_others_replace_is_not_covered() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    forward = model[0].forward
    model[0].forward = lambda x: 2 * forward(x)  # type: ignore[method-assign,assignment]
    model[1].register_full_backward_hook(lambda module, dx, dy: (2 * dx[0],))
    with f4.audit(model) as report:
        model(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
    assert not report.faults, str(report)
    assert report.uncovered == dict.fromkeys("01", "hooks of others may change its passes")


def test_gradients_that_are_differentiated_themselves_are_not_covered() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with f4.audit(layer) as report:
        y = layer(x).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        (y + dx.square().sum()).backward()
    assert not report.faults, str(report)
    assert "create_graph" in report.uncovered[""]


def test_a_later_backward_pass_that_gives_fewer_gradients_is_no_fault() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    with f4.audit(layer) as report:
        y = layer(x)
        y.square().sum().backward(retain_graph=True)
        torch.autograd.grad(y.sin().sum(), x)
    assert not report.faults, str(report)
    assert [list(result.gemms) for result in report.audits] == [["fprop", "dgrad"]]


def test_hooks_on_all_modules_that_change_what_layers_return_are_no_fault() -> None:
    layer = nn.Linear(8, 8)
    hook = nn.modules.module.register_module_forward_hook(lambda module, arguments, y: 2 * y)
    with hook, f4.audit(layer) as report:
        layer(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
    assert report.uncovered == {"": "hooks of others may change its passes"}


def test_float32_products_may_take_narrower_formats_where_torch_is_set_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As TF32 on GPUs, and BF16 on CPUs that have its products."""
    linear = F.linear

    def narrow(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear(x.bfloat16().float(), w.bfloat16().float(), bias)

    monkeypatch.setattr(F, "linear", narrow)
    layer = nn.Linear(64, 64)
    faults = {}
    for precision in ("highest", "medium"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda name=precision: name)
        with f4.audit(layer) as report:
            layer(torch.randn(32, 64, requires_grad=True)).square().sum().backward()
        faults[precision] = bool(report.faults)
    assert faults == {"highest": True, "medium": False}


def test_later_code_may_write_into_what_a_layer_returns() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    with f4.audit(model) as report:
        model(torch.randn(4, 8, requires_grad=True)).square().sum().backward()
    assert not report.faults and not report.uncovered, str(report)
    assert [list(result.gemms) for result in report.audits] == [GEMMS] * 2


def test_a_weight_that_is_made_of_others_stays_as_it_is() -> None:
    """As that of torch's weight_norm, which is no parameter."""
    layer: Any = nn.Linear(8, 8)
    weight = layer.weight.detach().clone().requires_grad_()
    del layer.weight
    layer.weight = weight
    with f4.audit(layer) as report:
        layer(torch.randn(4, 8)).square().sum().backward()
    assert list(report.uncovered.values()) == ["its weight is made of others"]
    assert "weight" not in layer._parameters and layer.weight is weight
