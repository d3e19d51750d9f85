"""The three products of a linear layer against Transformer Engine's PyTorch reference (golden
`gemms`).

The reference multiplies block by block and adds the blocks up in float32; backend=reference does
the same, and backend=emulate adds in the order of the machine's GEMM. Measured, both differ from
the golden float32 products by at most 1.4e-7 of the norm (bound here: 1e-6). A layer's BF16 output
is the same number rounded once: 1.7e-3 of the norm, each element within half a unit in the last
place (bound: 2e-3).
"""

import pytest
import torch
from golden import load_golden
from prepared import prepared

from fp4train.backends import BACKENDS
from fp4train.nn import Linear
from fp4train.precision import NVFP4, autocast

TENSORS, LISTS = load_golden("nvfp4_reference")
GEMMS = sorted({name.split(".")[0] for name in TENSORS if name.startswith("gemm")})
RECIPE = NVFP4(stochastic_rounding=False)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def tensors(case: str) -> tuple[torch.Tensor, ...]:
    return tuple(TENSORS[f"{case}.{name}"] for name in ("x", "w", "dy", "y", "dx", "dw"))


@pytest.mark.parametrize("backend", ["reference", "emulate"])
@pytest.mark.parametrize("case", GEMMS)
def test_float32_products_equal_the_reference(case: str, backend: str) -> None:
    x, w, dy, y, dx, dw = tensors(case)
    gemm = BACKENDS[backend]
    table = RECIPE.table()
    operands = {
        "y": (x, table["fprop"].first, w, table["fprop"].second, y),
        "dx": (dy, table["dgrad"].first, w.T, table["dgrad"].second, dx),
        "dw": (dy.T, table["wgrad"].first, x.T, table["wgrad"].second, dw),
    }
    for name, (first, first_spec, second, second_spec, golden) in operands.items():
        found = gemm.product(
            prepared(gemm, first, first_spec),
            prepared(gemm, second, second_spec),
            out_dtype=torch.float32,
        )
        assert relative(found, golden) <= 1e-6, name


@pytest.mark.parametrize("backend", ["reference", "emulate"])
@pytest.mark.parametrize("case", GEMMS)
def test_a_layer_rounds_the_reference_once(case: str, backend: str) -> None:
    x, w, dy, y, dx, dw = tensors(case)
    layer = Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, backend=backend)
    with torch.no_grad():
        layer.weight.copy_(w)
    x = x.clone().requires_grad_()
    with autocast(RECIPE):
        found = layer(x)
    found.backward(dy)
    for name, a, golden in (
        ("y", found.detach(), y),
        ("dx", x.grad, dx),
        ("dw", layer.weight.grad, dw),
    ):
        assert a is not None and a.dtype == torch.bfloat16
        error = (a.double() - golden.double()).abs()
        assert bool(
            (error <= 2.0**-8 * golden.double().abs() + 1e-6 * golden.double().abs().max()).all()
        ), name
        assert relative(a, golden) < 2e-3, name


def test_all_golden_products_are_compared() -> None:
    assert [case["id"] for case in LISTS["gemms"]] == GEMMS != []
