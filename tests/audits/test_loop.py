"""Audits in a loop of one's own: clean passes of every recipe have no fault, planted faults are found
at their place and named, and no bit of a pass changes.
"""

from __future__ import annotations

import itertools
from typing import Any

import audit_planting as planting
import pytest
import torch
from recorded_products import GroupRecorder, Recorder
from torch import Tensor, nn

import fp4train as f4
from fp4train.audits import loop, observe
from fp4train.audits.bits import difference
from fp4train.audits.call import kept_or_none
from fp4train.audits.compare import GemmComparison
from fp4train.audits.hypotheses import Suspect
from fp4train.hardware import Device, find_gpu
from fp4train.nn import Experts, Linear
from fp4train.precision import (
    NVFP4,
    LayerPolicy,
    OutlierChannels,
    Recipe,
    TetraJetV2Outliers,
    backward_pass,
    recipes,
    recompute,
    resolve,
)

RECIPES = (
    NVFP4(),
    NVFP4(four_over_six="weights", four_over_six_error="mse"),
    NVFP4(row_scaled_activation=True),
    recipes.MXFP4(),
    recipes.MXFP6(),
    recipes.MXFP8(),
    recipes.FP8Block(),
    recipes.FP8Current(),
    recipes.FP8Delayed(),
    recipes.FP8Row(),
    recipes.QuartetII(),
    recipes.TetraJetV2(),
    recipes.BF16(),
    recipes.FP32(),
    NVFP4(backward="dequantised"),
)
OUTLIERS = recipes.TetraJetV2(
    outliers=OutlierChannels(recipe=TetraJetV2Outliers(), share=0.1, start=0, steps=1, multiple=32)
)
LAYER = "2"


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    widths = (64, 96, 64, 64)
    parts: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        parts += [nn.Linear(width, following), nn.GELU()]
    return f4.convert(nn.Sequential(*parts[:-1]))


def batch(step: int = 0, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(64, 64, generator=generator)


def passes(layers: nn.Module, x: torch.Tensor, recipe: Recipe, step: int = 5) -> torch.Tensor:
    with f4.autocast(recipe, policy=LayerPolicy(last=1), seed=1, step=step, token_offset=64):
        y: torch.Tensor = layers(x)
    loss = (y.float() - x).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("recipe", RECIPES, ids=range(len(RECIPES)))
def test_a_clean_pass_of_every_recipe_has_no_fault(recipe: Recipe) -> None:
    layers = model()
    for step in range(2):
        with f4.audit(layers) as report:
            passes(layers, batch(step), recipe, step)
        assert not report.faults, str(report)
        assert not report.uncovered
        assert [audit.layer for audit in report.audits] == ["0", "2", "4"]
        assert all("wgrad" in audit.gemms for audit in report.audits)


@pytest.mark.parametrize(
    "fault",
    [fault for fault, (_, words) in planting.OPERAND_FAULTS.items() if "step before" not in words],
)
def test_a_planted_fault_of_an_operand_is_found_and_named(fault: str) -> None:
    """But for that of the step before, which a loop's audit does not keep: tests of runs plant
    it.
    """
    change, words = planting.OPERAND_FAULTS[fault]
    layers = model()
    x = batch()
    if "zero block scale" in fault:
        layers[1] = nn.Threshold(-1e9, 0.0)
        layers[1].forward = lambda h: torch.cat((h[:, :16] * 1e-8, h[:, 16:]), 1)  # type: ignore[method-assign]
    with planting.planted_operand(change, LAYER), f4.audit(layers) as report:
        passes(layers, x, NVFP4())
    named = [fault for fault in report.faults if words in fault.cause]
    assert named, str(report)
    assert {fault.layer for fault in report.faults} == {LAYER}
    assert named[0].operand and named[0].first


@pytest.mark.parametrize("fault", planting.PRODUCT_FAULTS)
def test_a_planted_fault_of_a_product_is_found_and_named(fault: str) -> None:
    gemm, change, words = planting.PRODUCT_FAULTS[fault]
    layers = model()
    with planting.planted_product(gemm, change, LAYER), f4.audit(layers) as report:
        passes(layers, batch(), NVFP4())
    named = [fault for fault in report.faults if words in fault.cause]
    assert named, str(report)
    assert {fault.layer for fault in report.faults} == {LAYER}
    assert not named[0].operand and named[0].gemm


def test_a_product_that_is_always_wrong_is_found_although_it_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fp4train.backends import emulate

    layers = model()
    product = emulate.matmul
    monkeypatch.setattr(emulate, "matmul", lambda *a, **more: product(*a, **more) * 1.02)
    with f4.audit(layers) as report:
        passes(layers, batch(), NVFP4())
    assert any("multiplied by 1.02" in fault.cause for fault in report.faults)


def test_a_pass_has_the_same_bits_with_and_without_its_audit() -> None:
    gradients = []
    for watched in (False, True):
        layers = model()
        x = batch().requires_grad_()
        if watched:
            with f4.audit(layers) as report:
                passes(layers, x, NVFP4())
            assert report.audits
        else:
            passes(layers, x, NVFP4())
        assert x.grad is not None
        gradients.append([x.grad, *(p.grad for p in layers.parameters())])
    for plain, audited in zip(*gradients, strict=True):
        assert difference(plain, audited) is None
    assert all(layer.observer is None for layer in layers.modules() if isinstance(layer, Linear))


def test_a_pass_without_gradients_takes_the_place_of_none_that_learns() -> None:
    layers = model()
    with f4.audit(layers) as report:
        with torch.no_grad(), f4.autocast(NVFP4(), policy=LayerPolicy(last=1), seed=1, step=5):
            layers(2 * batch())
        passes(layers, batch(), NVFP4())
    assert not report.faults and not report.uncovered, str(report)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_no_number_is_no_fault_whatever_its_bits(value: float) -> None:
    x = batch()
    x[3, 5] = value
    layers = model()
    with f4.audit(layers) as report:
        passes(layers, x, NVFP4())
    assert not report.faults, str(report)


def test_an_audit_between_two_microbatches_takes_the_amax_of_their_step() -> None:
    layers = model()
    for part in range(2):
        with f4.audit(layers) as report:
            passes(layers, batch(part=part), recipes.FP8Delayed())
        assert not report.faults, str(report)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1.0), (torch.float32, 5e-35)])
def test_gradients_near_the_smallest_number_of_a_dtype_are_no_fault(
    dtype: torch.dtype, scale: float
) -> None:
    layers = model().to(dtype)
    with f4.audit(layers) as report, f4.autocast(recipes.BF16()):
        (layers(batch().to(dtype)).float().square().mean() * scale).backward()
    assert not report.faults, str(report)


def test_all_layers_of_two_models_that_were_converted_apart_are_audited() -> None:
    both = nn.Sequential(model(), model())
    with f4.audit(both) as report:
        passes(both, batch(), NVFP4())
    assert len(report.audits) == 6 and not report.uncovered, str(report)


def test_recomputed_layers_are_audited() -> None:
    layers = model()
    x = batch().requires_grad_()
    with f4.audit(layers) as report:
        with f4.autocast(NVFP4(), policy=LayerPolicy(last=1), seed=1, step=2):
            y = recompute(layers, x)
        y.float().square().mean().backward()
    assert not report.faults, str(report)
    assert [list(audit.gemms) for audit in report.audits[:2]] == [["fprop", "dgrad", "wgrad"]] * 2


def test_an_expert_is_audited_as_a_layer_of_its_own() -> None:
    torch.manual_seed(0)
    experts = Experts(3, 64, 96)
    with f4.audit(experts) as report:
        with f4.autocast(NVFP4(), seed=1, step=2):
            y = experts(batch().bfloat16().requires_grad_(), [0, 40, 24])
        y.float().square().mean().backward()
    assert not report.faults, str(report)
    assert [audit.layer for audit in report.audits] == ["experts.1"]


def test_what_cannot_be_audited_is_said_with_its_reason() -> None:
    layers = model()
    with f4.audit(layers) as report, torch.no_grad():
        layers(batch())
    (why,) = set(report.uncovered.values())
    assert why.startswith(
        "it was not called in training, or outside of f4.autocast, or by torch.comp"
    )
    with pytest.raises(ValueError, match="no linear layer"), f4.audit(nn.GELU()):
        pass
    with pytest.raises(ValueError, match="no layer 7"), f4.audit(layers, layers=["7"]):
        pass
    for names in ([], "foo", ""):
        refused = pytest.raises(ValueError, match=r"layers=.* must be a list of names")
        with refused, f4.audit(layers, layers=names, every=1, step=0):
            pass


def test_a_backward_pass_behind_the_context_is_said_beside_the_forward_pass() -> None:
    layers = nn.Sequential(model(), nn.Linear(64, 64))
    policy = LayerPolicy(last=1)
    with f4.audit(layers) as report, f4.autocast(NVFP4(), policy=policy, seed=1, step=5):
        y = layers(batch())
    y.float().square().mean().backward()
    names = ["0", "2", "4", "1"]
    assert [audit.layer for audit in report.audits] == names
    assert all(list(audit.gemms) == ["fprop"] for audit in report.audits)
    assert report.uncovered == dict.fromkeys(names, "its backward pass was not seen")
    assert "not covered: 1: its backward pass was not seen" in str(report)


def test_audits_without_a_number_take_other_rows_of_large_products_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[int] = []
    compare_records = loop.compare_records

    def noting(name: str, recorder: Any, step: int) -> Any:
        turns.append(step)
        return compare_records(name, recorder, step)

    monkeypatch.setattr(loop, "compare_records", noting)
    layers = model()
    for step in (None, None, 7, None):
        with f4.audit(layers, layers=["0"], step=step) as report:
            passes(layers, batch(), NVFP4())
        assert not report.faults, str(report)
    assert turns == [0, 1, 7, 2]


@pytest.mark.parametrize("recipe", [recipes.MXFP8(), recipes.FP8Block()], ids=["mxfp8", "blocks"])
@pytest.mark.parametrize("fault", ["a padded tail not masked", "one 4-bit code doubled"])
def test_a_fault_in_a_recipe_without_a_global_scale_is_found(recipe: Recipe, fault: str) -> None:
    change, words = planting.OPERAND_FAULTS[fault]
    layers = model()
    with planting.planted_operand(change, LAYER), f4.audit(layers) as report:
        passes(layers, batch(), recipe)
    assert not report.uncovered
    assert any(words in fault.cause for fault in report.faults), str(report)
    assert {fault.layer for fault in report.faults} == {LAYER}


def test_a_fault_that_cannot_be_explained_is_found_without_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change, _ = planting.OPERAND_FAULTS["a padded tail not masked"]
    monkeypatch.setattr(Suspect, "cause", broken)
    layers = model()
    with planting.planted_operand(change, LAYER), f4.audit(layers) as report:
        passes(layers, batch(), NVFP4())
    assert report.faults and not report.faults[0].cause
    assert not report.uncovered


def test_a_gemm_whose_comparison_fails_leaves_the_faults_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = GemmComparison.findings

    def fails_for_dgrad(self: Any) -> Any:
        return broken() if self.gemm.name == "dgrad" else findings(self)

    monkeypatch.setattr(GemmComparison, "findings", fails_for_dgrad)
    change, _ = planting.OPERAND_FAULTS["a padded tail not masked"]
    layers = model()
    with planting.planted_operand(change, LAYER), f4.audit(layers) as report:
        passes(layers, batch(), NVFP4())
    assert {fault.gemm for fault in report.faults} == {"fprop"}
    assert report.uncovered[LAYER] == "its audit failed: dgrad: no memory"


@pytest.mark.parametrize(
    ("owner", "name", "recipe"),
    [
        (observe.Observer, "begin", NVFP4()),
        (observe.Observer, "begin", recipes.BF16()),
        # autograd copies the gradients of a layer in BF16
        (observe, "kept_or_none", NVFP4()),
        (loop, "compare_records", NVFP4()),
    ],
    ids=["forward", "forward, bf16", "backward", "comparison"],
)
def test_an_audit_that_fails_ends_no_pass_and_is_not_covered(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, recipe: Recipe
) -> None:
    expected = passes(model(), batch(), recipe)
    monkeypatch.setattr(owner, name, broken_in_backward if name == "kept_or_none" else broken)
    layers = model()
    with f4.audit(layers, layers=["0", "2"]) as report:
        loss = passes(layers, batch(), recipe)
    assert loss == expected
    assert layers[0].weight.grad is not None
    assert report.uncovered == dict.fromkeys(("0", "2"), "its audit failed: no memory")
    assert not report.audits


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("no memory")


def broken_in_backward(tensor: Tensor | None) -> Tensor | None:
    if backward_pass() != -1:
        raise RuntimeError("no memory")
    return kept_or_none(tensor)


def test_experts_that_are_multiplied_in_one_call_are_not_covered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", GroupRecorder())
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", Recorder())
    experts = Experts(3, 128, 160)
    plan = resolve(experts.layer, NVFP4(), None, "native", Device.elsewhere(find_gpu("B200")))
    assert plan.fprop.grouped
    experts.apply_plan(plan, NVFP4(), None, torch.device("cpu"))
    with f4.audit(experts) as report:
        with f4.autocast(NVFP4(), seed=1, step=2):
            y = experts(torch.randn(64, 128).bfloat16().requires_grad_(), [0, 40, 24])
        y.float().square().mean().backward()
    (reason,) = report.uncovered.values()
    assert "multiplied in one call" in reason
    assert not report.audits


def outlier_passes(layers: nn.Module, step: int) -> None:
    """One pass of a model whose recipe multiplies 32 channels apart from the second step on."""
    x = batch(step)
    x[:, :2] *= 30
    with f4.autocast(OUTLIERS, seed=1, step=step):
        y = layers(x)
    (y.float() - x).square().mean().backward()


def test_both_parts_of_a_layer_with_outlier_channels_are_audited() -> None:
    plain, layers = model(), model()
    for step in range(3):
        outlier_passes(plain, step)
        with f4.audit(layers) as report:
            outlier_passes(layers, step)
        assert not report.faults and not report.uncovered, str(report)
        gemms = [list(audit.gemms) for audit in report.audits]
        assert gemms == [["fprop", "wgrad"], *[["fprop", "dgrad", "wgrad"]] * 2]
    assert layers[2]._held[3].dense_channels is not None
    for a, b in zip(plain.parameters(), layers.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_a_fault_in_a_layer_with_outlier_channels_is_found_and_named() -> None:
    layers = model()
    for step in range(2):
        outlier_passes(layers, step)
    change, words = planting.OPERAND_FAULTS["zeroed stochastic rounding"]
    with planting.planted_operand(change, LAYER), f4.audit(layers) as report:
        outlier_passes(layers, 2)
    assert any(words in fault.cause for fault in report.faults), str(report)
