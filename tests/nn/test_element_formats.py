"""A layer trains in every element format, whether a kernel knows it or not."""

import pytest
import torch

from fp4train.formats import ELEMENT_FORMATS, ElementFormat
from fp4train.nn import Linear
from fp4train.precision import Custom, autocast, by_tensor
from fp4train.quantize import QuantSpec, quantize


@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda fmt: fmt.name)
def test_a_layer_multiplies_the_values_of_the_format_and_learns(fmt: ElementFormat) -> None:
    torch.manual_seed(0)
    spec = QuantSpec(element=fmt.name, block=(1, 32), scale="e8m0", global_scale=None)
    layer = Linear(64, 32, bias=False, backend="reference")
    x_MK = torch.randn(32, 64)
    recipe = Custom(label=fmt.name, dtype="float32", **by_tensor(spec, spec, spec))
    with autocast(recipe, step=0):
        y_MN = layer(x_MK)
    expected = (
        quantize(x_MK, spec).dequantize() @ quantize(layer.weight.detach(), spec).dequantize().T
    )
    torch.testing.assert_close(y_MN, expected)
    target = torch.zeros(32, 32)
    loss = torch.nn.functional.mse_loss(y_MN, target)
    loss.backward()
    assert layer.weight.grad is not None and layer.weight.grad.isfinite().all()
    with torch.no_grad():
        layer.weight -= 2 * layer.weight.grad
    with autocast(recipe, step=1):
        assert torch.nn.functional.mse_loss(layer(x_MK), target) < 0.9 * loss
