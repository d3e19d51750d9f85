"""What audits allow the arithmetic of GPUs, told from faults: sums of tensor cores, dw that is added
to a sum in the product.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.audit import products
from fp4train.audit.call import ObservedCall, Product
from fp4train.audit.compare import CallComparison
from fp4train.audit.expected import Expectation
from fp4train.audit.observe import Observer
from fp4train.backends import tensor_cores
from fp4train.nn import Linear
from fp4train.precision import BF16, FP8Current, FP8Row, Recipe
from fp4train.quantize import Quantized

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
    first, second = product.first, product.second
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
    assert not CallComparison(sums_of(call, call.dw), Expectation(call.plan)).run().faults
    (fault,) = CallComparison(sums_of(call, 2 * call.dw), Expectation(call.plan)).run().faults
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
    assert not CallComparison(record, Expectation(record.plan)).run().faults


def test_an_element_beyond_the_share_that_the_model_gives_is_no_fault() -> None:
    """One product of a row is so large that all others are cut off."""
    call = observed(FP8Current(), tokens=4096)
    product = call.products["wgrad"]
    first, second = product.first, product.second
    assert isinstance(first, Quantized) and isinstance(second, Quantized)
    first.codes[7] = torch.where(torch.arange(4096) == 0, 0x7B, 0x4F).to(torch.uint8)
    second.codes[9] = torch.where(torch.arange(4096) == 0, 0x7E, 0x5F).to(torch.uint8)
    summed = on_hopper(call, "wgrad")
    share = products.error_share(summed, call.plan.wgrad)
    bounds = products.bounds(first, second, None, summed.result, share=share)
    beyond = products.beyond_rounding(summed.result, *bounds)
    assert beyond[7, 9]
    assert products.compare(summed, call.plan.wgrad) is None
    summed.result[7, 9] *= 1.01
    assert products.compare(summed, call.plan.wgrad) is not None
