"""What audits allow the arithmetic of GPUs, told from faults: sums of tensor cores, dw that is added
to a sum in the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from lengths import long_but
from torch import Tensor, nn

import fp4train as f4
from fp4train.audits import products
from fp4train.audits.call import ObservedCall, Product
from fp4train.audits.compare import compare
from fp4train.audits.expected import AuditedCall
from fp4train.audits.observe import Observer
from fp4train.audits.recorder import CallRecorder, EdgeCall
from fp4train.backends import Multiplied, tensor_cores
from fp4train.nn import Linear
from fp4train.precision import BF16, FP8Current, FP8Row, Recipe
from fp4train.quantize import Quantized, QuantSpec

HOPPER = (9, 0)


def observed(recipe: Recipe, tokens: int = 1024) -> ObservedCall:
    """A call of a layer whose x and dy share a direction, so that sums grow."""
    (layer,) = f4.convert(nn.Sequential(nn.Linear(64, 128, bias=False)), backend="reference")
    assert isinstance(layer, Linear)
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(tokens, 1, generator=generator)
    x = (common + torch.randn(tokens, 64, generator=generator)).bfloat16().requires_grad_()
    dy = (common + torch.randn(tokens, 128, generator=generator)).bfloat16()
    observer = layer.observer = Observer(layer)
    with f4.autocast(recipe, step=0):
        y = layer(x)
    y.backward(dy)
    (record,) = observer.records
    return record


def on_hopper(call: ObservedCall, gemm: str) -> Product:
    """The product of a GEMM as the model of Hopper's tensor cores sums it, in float32."""
    product = call.products[gemm]
    first, second = product.left, product.right
    assert isinstance(first, Quantized) and isinstance(second, Quantized)
    fast = getattr(call.plan, gemm).operands.accumulator == "fast"
    result = tensor_cores.product(first, second, tensor_cores.HOPPER_FP8, fast=fast)
    return replace(product, result=result, elsewhere=True, capability=HOPPER)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("recipe", [FP8Current(), FP8Row()])
def test_sums_of_tensor_cores_in_few_bits_are_no_fault(recipe: Recipe, gemm: str) -> None:
    call = observed(recipe)
    product = on_hopper(call, gemm)
    assert not torch.equal(product.result, call.products[gemm].result.float())
    assert products.compare(product, getattr(call.plan, gemm)) is None


def test_an_element_that_is_off_by_more_than_tensor_cores_err_is_a_fault() -> None:
    call = observed(FP8Current())
    product = on_hopper(call, "wgrad")
    product.result[3, 5] *= 1.05
    apart = products.compare(product, call.plan.wgrad)
    assert apart is not None and apart.count == 1 and apart.first == (3, 5)


def test_sums_of_a_gpu_whose_units_are_not_known_may_err_more() -> None:
    call = observed(FP8Current())
    product = replace(on_hopper(call, "wgrad"), capability=(12, 0))
    assert products.compare(product, call.plan.wgrad) is None
    product.result.mul_(2)
    assert products.compare(product, call.plan.wgrad) is not None


def sums_of(call: ObservedCall, term: Tensor) -> ObservedCall:
    """The call, had its product added `term` to the sum of the microbatches before."""
    before = torch.randn(term.shape, generator=torch.Generator().manual_seed(2))
    return replace(call, dw_before=before, dw=before + term)


def test_dw_in_high_precision_that_is_added_to_a_sum_is_compared_without_it() -> None:
    call = observed(BF16())
    assert call.dw is not None
    assert not compare(AuditedCall(sums_of(call, call.dw))).faults
    (fault,) = compare(AuditedCall(sums_of(call, 2 * call.dw))).faults
    assert (fault.gemm, fault.what) == ("wgrad", "the product is not that of the plan")


def test_a_bias_that_the_optimizer_changes_after_the_pass_is_no_fault() -> None:
    (layer,) = f4.convert(nn.Sequential(nn.Linear(64, 32)), backend="reference")
    assert isinstance(layer, Linear) and layer.bias is not None
    observer = layer.observer = Observer(layer)
    with f4.autocast(FP8Row(), step=0):
        y = layer(torch.randn(64, 64).bfloat16())
    y.sum().backward()
    (record,) = observer.records
    with torch.no_grad():
        layer.bias += 1
    assert not compare(AuditedCall(record)).faults


@cache
def long_sums() -> tuple[Quantized, Quantized, Tensor]:
    """Operands and their product in Hopper's fast accumulator: see `cut_off`."""
    generator = torch.Generator().manual_seed(5)
    spec = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)

    def operand(rows: int, row: int) -> Quantized:
        values = torch.randn(rows, 4096, generator=generator)
        values[row] = 1.0
        values[row, 0] = 448.0
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
        return Quantized(spec, (rows, 4096), codes, torch.ones(1, 1), None)

    first = operand(128, 7)
    second = operand(64, 9)
    return first, second, tensor_cores.product(first, second, tensor_cores.HOPPER_FP8, fast=True)


def cut_off(*, bias: bool = False) -> Product:
    """A product in Hopper's fast accumulator, whose element [7, 9] has one term so large that all
    others are cut off; the rows that `error_share` looks at have none.
    """
    first, second, sums = long_sums()
    result = sums.clone()
    product = Product(first, second, result, elsewhere=True, capability=HOPPER)
    if not bias:
        return product
    # all but a little of the sum is taken back
    bias_N = torch.zeros(64)
    bias_N[9] = 700.0 - result[7, 9]
    return replace(product, result=(result + bias_N.bfloat16()).bfloat16(), bias=bias_N)


@pytest.mark.parametrize(
    "whose",
    long_but(["a layer of fp4train"], ["a layer of fp4train", "a module of Transformer Engine"]),
)
def test_transformer_engine_sums_fprop_in_the_fast_accumulator(whose: str) -> None:
    gemm = observed(FP8Current(), tokens=64).plan.fprop
    product = cut_off()
    assert products.compare(product, gemm) is not None
    if whose == "a layer of fp4train":
        gemm = replace(gemm, backend="te")
    else:
        product = replace(product, backend="te")
    assert products.compare(product, gemm) is None
    assert products.compare(product, replace(gemm, name="dgrad")) is not None


def test_a_shown_product_names_the_backend_that_multiplied() -> None:
    call = observed(BF16(), tokens=64)
    reports: list[Callable[[Multiplied], None]] = []

    class Backend:
        name = "te"

        def watcher(self, report: Callable[[Multiplied], None], guarding: Any) -> None:
            reports.append(report)

    EdgeCall(CallRecorder(), call, Backend())  # type: ignore[arg-type]
    product = cut_off()
    reports[0](Multiplied("fprop", product.left, product.right, product.result, None, None))
    assert call.products["fprop"].backend == "te"


def test_an_element_cut_off_in_a_product_that_is_added_to_a_sum_is_no_fault() -> None:
    gemm = replace(observed(FP8Current(), tokens=64).plan.fprop, backend="te")
    product = cut_off()
    before = torch.randn(product.result.shape, generator=torch.Generator().manual_seed(6))
    product = replace(product, earlier_sum=before, result=before + product.result)
    assert products.compare(product, gemm) is None
    product.result[7, 9] *= 1.01
    apart = products.compare(product, gemm)
    assert apart is not None and apart.first == (7, 9)


def test_the_bias_of_an_element_that_is_cut_off_is_rounded_before_it_is_added() -> None:
    gemm = replace(observed(FP8Current(), tokens=64).plan.fprop, backend="te")
    product = cut_off(bias=True)
    assert products.compare(product, gemm) is None
    product.result[7, 9] *= -3
    assert products.compare(product, gemm) is not None


def test_of_many_elements_beyond_the_bound_only_those_that_tensor_cores_give_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = observed(FP8Current())
    monkeypatch.setattr(products, "error_share", lambda product, gemm: 0.0)
    product = on_hopper(call, "wgrad")
    assert products.compare(product, call.plan.wgrad) is None
    product.result[-1, -1] *= 1.5
    apart = products.compare(product, call.plan.wgrad)
    assert apart is not None and (apart.count, apart.first) == (1, (127, 63))
    changed = on_hopper(call, "wgrad")
    changed.result[-20:] *= 1.5
    apart = products.compare(changed, call.plan.wgrad)
    assert apart is not None and apart.where[-20:].all() and apart.count == 20 * 64


def test_other_rows_are_compared_in_each_audit() -> None:
    rows = [set(products.sampled(2048, turn).tolist()) for turn in range(100, 3300, 100)]
    assert all(len(chosen) == products.ROWS and {0, 2047} <= chosen for chosen in rows)
    assert len(set.union(*rows)) > 2000
    call = observed(FP8Current(), tokens=2048)
    product = on_hopper(call, "fprop")
    later = min(rows[1] - rows[0])
    product.result[later] *= 2
    assert products.compare(product, call.plan.fprop, 100) is None
    assert products.compare(product, call.plan.fprop, 200) is not None


@pytest.mark.parametrize("code", [0x00, 0x80, 0x38])
def test_codes_beyond_the_tensor_must_be_zero(code: int) -> None:
    call = observed(FP8Row(), tokens=64)

    def wider(operand: Any) -> Quantized:
        codes = torch.nn.functional.pad(operand.codes, (0, 16), value=code)
        return operand._replace(codes=codes)  # type: ignore[no-any-return]

    product = call.products["fprop"]
    call.products["fprop"] = replace(product, right=wider(product.right))
    faults = compare(AuditedCall(call)).faults
    if code in (0x00, 0x80):  # zero, and -0
        assert not faults
        return
    (fault,) = faults
    assert (fault.gemm, fault.operand, fault.first) == ("fprop", "w", (0, 64))
    assert fault.what == "its padding is not zero"


def test_a_result_that_is_not_seen_is_told_where_its_product_is_compared() -> None:
    call = observed(FP8Row(), tokens=64)
    call = replace(call, dw=None, unseen={"wgrad": "its sum is added to that of other calls"})
    audited = compare(AuditedCall(call))
    assert "wgrad" in audited.gemms and not audited.faults
    assert audited.uncovered == ["wgrad: its sum is added to that of other calls"]
