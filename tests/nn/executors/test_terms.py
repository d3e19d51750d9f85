"""Operands of two terms: means over tokens that are taken out, residuals that are multiplied too.
Each product is that of its formula, written here from codes: no public program of Averis (2603.10444),
CHON (2602.02047) or AMD's residual of x was found.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4train.backends import Operands
from fp4train.hardware import Device, find_gpu
from fp4train.nn import Experts, Linear
from fp4train.precision import (
    MXFP4,
    MXFP8,
    NVFP4,
    Custom,
    Layer,
    Mixed,
    OutlierChannels,
    Recipe,
    Residual,
    autocast,
    recompute,
    resolve,
)
from fp4train.quantize import QuantSpec, quantize

PLAIN = QuantSpec()
FOUR_BITS = NVFP4(hadamard=False, stochastic_rounding=False, two_d_weights=False)
M, K, N = 48, 64, 32


def value(x: Tensor, spec: QuantSpec = PLAIN) -> Tensor:
    """The values of the codes of x, float64."""
    return quantize(x, spec).dequantize().double()


def layer(backend: str = "auto", bias: bool = False) -> Linear:
    torch.manual_seed(0)
    return Linear(K, N, bias=bias, backend=backend)


def inputs(mean: float = 20.0) -> tuple[Tensor, Tensor]:
    """x and dy, whose features have means that are large beside their spread."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(M, K, generator=generator) + mean * torch.randn(1, K, generator=generator)
    dy = torch.randn(M, N, generator=generator) + mean * torch.randn(1, N, generator=generator)
    return x.bfloat16(), dy.bfloat16()


def trained(
    module: Linear, recipe: Recipe, x: Tensor, dy: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    leaf = x.clone().requires_grad_()
    with autocast(recipe, step=0, **options):
        y = module(leaf)
    y.backward(dy.to(y.dtype))
    assert leaf.grad is not None and module.weight.grad is not None
    return y.detach(), leaf.grad, module.weight.grad


def by_formula(
    module: Linear, x: Tensor, dy: Tensor, centred: tuple[str, ...]
) -> tuple[Tensor, ...]:
    """y, dx and dw with the means of these tensors taken out, from codes."""
    w = module.weight.detach()
    mean = {"x": x.float().mean(0), "dy": dy.float().mean(0)}
    x_part = (x.float() - mean["x"]).bfloat16() if "x" in centred else x
    dy_part = (dy.float() - mean["dy"]).bfloat16() if "dy" in centred else dy
    y = value(x_part) @ value(w).T
    dx = value(dy_part) @ value(w.T).T
    dw = value(dy_part.T) @ value(x_part.T).T
    if "x" in centred:
        y = y + value(w) @ mean["x"].double()
    if "dy" in centred:
        dx = dx + mean["dy"].double() @ value(w.T).T
    return y, dx, dw + M * torch.outer(mean["dy"], mean["x"]).double()


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("backend", ["emulate", "reference"])
@pytest.mark.parametrize("centred", [("x",), ("dy",), ("x", "dy")], ids=str)
def test_the_products_are_those_of_the_formula(backend: str, centred: tuple[str, ...]) -> None:
    x, dy = inputs()
    module = layer(backend)
    results = trained(module, replace(FOUR_BITS, centred=centred), x, dy)
    for result, expected in zip(results, by_formula(module, x, dy, centred), strict=True):
        assert distance(result, expected) < 3e-3, "BF16 rounds to 2⁻⁹"


def test_large_means_cost_no_precision() -> None:
    """Of weights without an error: the mean is multiplied by what fprop and dgrad multiply."""
    x, dy = inputs(mean=50.0)
    module = layer()
    recipe = NVFP4(hadamard=False, stochastic_rounding=False)
    with torch.no_grad():
        module.weight.copy_(value(module.weight.detach(), QuantSpec(block=(16, 16))))
    exact = (
        x.double() @ module.weight.detach().double().T,
        dy.double() @ module.weight.detach().double(),
        dy.double().T @ x.double(),
    )
    plain = trained(module, recipe, x, dy)
    module.weight.grad = None
    centred = trained(module, replace(recipe, centred=("x", "dy")), x, dy)
    for name, before, after, right in zip(("y", "dx", "dw"), plain, centred, exact, strict=True):
        assert distance(after, right) < 0.2 * distance(before, right), name


def test_the_hadamard_transform_of_wgrad_turns_what_is_left() -> None:
    x, dy = inputs()
    module = layer()
    recipe = NVFP4(stochastic_rounding=False, centred=("x", "dy"))
    _, _, dw = trained(module, recipe, x, dy)
    assert distance(dw, dy.double().T @ x.double()) < 0.02


@pytest.mark.parametrize(
    "kept", [("fprop",), ("dgrad",), ("wgrad",), ("fprop", "dgrad"), ("dgrad", "wgrad")], ids=str
)
def test_gemms_in_high_precision_take_the_tensors_as_they_are(kept: tuple[str, ...]) -> None:
    x, dy = inputs()
    module = layer()
    recipe = replace(FOUR_BITS, centred=("x", "dy"), high_precision=kept)
    y, dx, dw = trained(module, recipe, x, dy)
    w = module.weight.detach().bfloat16().double()
    exact = {
        "fprop": x.double() @ w.T,
        "dgrad": dy.double() @ w,
        "wgrad": dy.double().T @ x.double(),
    }
    formula = dict(zip(exact, by_formula(module, x, dy, ("x", "dy")), strict=True))
    for gemm, result in zip(exact, (y, dx, dw), strict=True):
        expected = exact[gemm] if gemm in kept else formula[gemm]
        assert distance(result, expected) < 3e-3, gemm


def test_one_centred_operand_of_wgrad_beside_one_in_high_precision() -> None:
    x, dy = inputs()
    module = layer()
    for operands in (Operands(first=PLAIN), Operands(second=PLAIN)):
        recipe = Custom(wgrad=operands, centred=("dy" if operands.first else "x",))
        module.weight.grad = None
        _, _, dw = trained(module, recipe, x, dy)
        centred = {"x": (x.float() - x.float().mean(0)), "dy": (dy.float() - dy.float().mean(0))}
        first = value(centred["dy"].T) if operands.first else dy.double().T
        second = value(centred["x"].T).T if operands.second else x.double()
        mean = M * torch.outer(dy.double().mean(0), x.double().mean(0))
        assert distance(dw, first @ second + mean) < 3e-3


def test_a_dequantised_backward_takes_the_values_and_the_mean() -> None:
    x, dy = inputs()
    module = layer()
    _, dx, dw = trained(module, replace(FOUR_BITS, centred=("x",), backward="dequantised"), x, dy)
    mean = x.float().mean(0)
    values = value((x.float() - mean).bfloat16()) + mean.double()
    assert distance(dw, dy.double().T @ values) < 3e-3
    assert distance(dx, dy.double() @ value(module.weight.detach())) < 3e-3


def test_a_bias_is_added_once_and_gets_the_sum_of_dy() -> None:
    x, dy = inputs()
    recipe = replace(FOUR_BITS, centred=("x", "dy"))
    without = trained(layer(), recipe, x, dy)[0]
    module = layer(bias=True)
    y, *_ = trained(module, recipe, x, dy)
    assert module.bias is not None and module.bias.grad is not None
    torch.testing.assert_close(y - module.bias.detach().bfloat16(), without, rtol=0.02, atol=0.3)
    torch.testing.assert_close(module.bias.grad, dy.float().sum(0), rtol=0.01, atol=0.5)


@pytest.mark.parametrize(
    "recipe",
    [
        NVFP4(centred=("x", "dy")),
        NVFP4(residual=Residual(tensors=("x", "w"), spec=PLAIN, share=0.1)),
    ],
    ids=["centred", "residual"],
)
def test_a_recomputed_call_gives_the_same_bits(recipe: Recipe) -> None:
    x, dy = inputs()
    plain = trained(layer(), recipe, x, dy)
    module = layer()
    leaf = x.clone().requires_grad_()
    with autocast(recipe, step=0):
        y = recompute(module, leaf)
    y.backward(dy)
    assert torch.equal(leaf.grad, plain[1]) and torch.equal(module.weight.grad, plain[2])  # type: ignore[arg-type]


def test_an_expert_takes_the_mean_of_its_own_tokens() -> None:
    x, _ = inputs()
    torch.manual_seed(0)
    experts = Experts(2, K, N)
    recipe = replace(FOUR_BITS, centred=("x",))
    with torch.no_grad(), autocast(recipe, step=0):
        y = experts(x, [16, 32])
    for weight, rows, result in zip(
        experts.weight, x.split([16, 32]), y.split([16, 32]), strict=True
    ):
        mean = rows.float().mean(0)
        w = value(weight.detach().T if weight.shape[0] == K else weight.detach())
        expected = value((rows.float() - mean).bfloat16()) @ w.T + w @ mean.double()
        assert distance(result, expected) < 3e-3


# -- residuals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["emulate", "reference"])
@pytest.mark.parametrize("spec", [None, PLAIN], ids=["high precision", "four bits"])
@pytest.mark.parametrize("tensors", [("x",), ("w",), ("x", "w")], ids=str)
def test_a_residual_is_multiplied_too(
    backend: str, spec: QuantSpec | None, tensors: tuple[str, ...]
) -> None:
    x, dy = inputs(mean=0.0)
    module = layer(backend)
    recipe = replace(FOUR_BITS, residual=Residual(tensors=tensors, spec=spec))
    y, dx, dw = trained(module, recipe, x, dy)
    w = module.weight.detach()
    rests = {
        "x": (x.double() - value(x)).float(),
        "w": (w.double() - value(w)).float(),
    }
    second = {
        name: rest.bfloat16().double()
        if spec is None
        else quantize(rest, spec).dequantize().double()
        for name, rest in rests.items()
    }
    expected = value(x) @ value(w).T
    if "x" in tensors:
        expected = expected + second["x"] @ value(w).T
    if "w" in tensors:
        expected = expected + value(x) @ second["w"].T
    assert distance(y, expected) < 3e-3
    plain = layer(backend)
    _, *gradients = trained(plain, FOUR_BITS, x, dy)
    assert all(map(torch.equal, (dx, dw), gradients)), "backward is that of the recipe"


def test_hot_channels_are_those_with_the_largest_residuals_of_both() -> None:
    x, _ = inputs(mean=0.0)
    x[:, 5] *= 30
    x[:, 40] *= 50
    module = layer()
    w = module.weight.detach()
    recipe = replace(FOUR_BITS, residual=Residual(tensors=("x", "w"), share=2 / K))
    with torch.no_grad(), autocast(recipe, step=0):
        y = module(x)
    rest_x = x.double() - value(x)
    rest_w = w.double() - value(w)
    hot = (rest_x.abs().mean(0) + rest_w.abs().mean(0)).topk(2).indices
    expected = value(x) @ value(w).T
    expected = expected + rest_x[:, hot] @ value(w)[:, hot].T + value(x)[:, hot] @ rest_w[:, hot].T
    assert distance(y, expected) < 3e-3 < distance(value(x) @ value(w).T, expected)


def test_a_residual_of_what_is_left_beside_the_mean() -> None:
    x, _ = inputs()
    module = layer()
    recipe = replace(FOUR_BITS, centred=("x",), residual=Residual(spec=PLAIN))
    with torch.no_grad(), autocast(recipe, step=0):
        y = module(x)
    mean = x.float().mean(0)
    left = (x.float() - mean).bfloat16()
    rest = quantize((left.double() - value(left)).float(), PLAIN).dequantize().double()
    w = value(module.weight.detach())
    assert distance(y, (value(left) + rest) @ w.T + w @ mean.double()) < 3e-3


def test_a_share_of_less_than_a_feature_is_one_feature_and_shown_as_it_is() -> None:
    assert Residual(share=1e-12).count(K) == 1
    assert Residual(share=0.1).elements("bfloat16") == "BF16 of 10%"
    assert Residual(share=0.0025).elements("bfloat16") == "BF16 of 0.25%"


def test_a_product_in_high_precision_has_no_residual() -> None:
    x, dy = inputs(mean=0.0)
    recipe = replace(FOUR_BITS, residual=Residual(), high_precision=("fprop",))
    y, *_ = trained(layer(), recipe, x, dy)
    plain, *_ = trained(layer(), replace(recipe, residual=None), x, dy)
    torch.testing.assert_close(y, plain, rtol=2**-8, atol=2**-8)


def test_a_number_that_is_none_is_seen() -> None:
    for recipe in (NVFP4(centred=("x", "dy")), NVFP4(residual=Residual(spec=PLAIN))):
        x, dy = inputs()
        x[3, 7] = torch.nan
        y, _, dw = trained(layer(), recipe, x, dy)
        assert y[3].isnan().all() and dw.isnan().any()


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a weight has no tokens": (lambda: NVFP4(centred=("w",)), ValueError, "centred: 'w' is none"),
    "nothing quantised": (
        lambda: Custom(fprop=Operands(first=PLAIN), centred=("dy",)),
        ValueError,
        r"quantises dy in no GEMM.*use recipe.centred=\[\]",
    ),
    "dy that backward does not quantise": (
        lambda: NVFP4(backward="dequantised", centred=("x", "dy")),
        ValueError,
        r"quantises dy in no GEMM.*use recipe.centred=\[x\]",
    ),
    "a share of none": (lambda: Residual(share=0), ValueError, "residual.share=0 must lie above 0"),
    "more than all": (lambda: Residual(share=1.5), ValueError, "residual.share=1.5"),
    "a word": (lambda: Residual(share="all"), TypeError, "must be a number"),
    "no operand": (lambda: Residual(tensors=()), ValueError, "name x, w or both"),
    "a gradient": (lambda: Residual(tensors=("dy",)), ValueError, "'dy' is none of x, w"),
    "drawn": (
        lambda: Residual(spec=QuantSpec(rounding="stochastic")),
        ValueError,
        "allowed is rounding='nearest'",
    ),
    "a spec that is none": (lambda: Residual(spec="nvfp4"), TypeError, "must be a QuantSpec"),
    "a residual that is none": (lambda: NVFP4(residual="x"), TypeError, "must be a Residual"),
    "codes that leave nothing": (
        lambda: Custom(fprop=Operands(first=PLAIN), residual=Residual(tensors=("w",))),
        ValueError,
        "does not quantise w in fprop",
    ),
    "a dequantised backward": (
        lambda: NVFP4(backward="dequantised", residual=Residual()),
        ValueError,
        "takes the values of one set of codes.*use backward='quantised'",
    ),
    "a product that is dequantised": (
        lambda: Custom(
            fprop=Operands(first=PLAIN, second=PLAIN),
            dgrad=Operands(dequantised=True),
            residual=Residual(),
        ),
        ValueError,
        "use dequantised=false in dgrad, or use recipe.residual=null",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_is_refused_by_name(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("backend", ["te", "native"])
@pytest.mark.parametrize(
    ("recipe", "instead"),
    [
        (NVFP4(centred=("x",)), r"x centred.*recipe.centred=\[\]"),
        (NVFP4(residual=Residual()), r"residual of x in BF16.*recipe.residual=null"),
    ],
    ids=["centred", "residual"],
)
def test_other_backends_refuse_and_name_what_runs(
    backend: str, recipe: Recipe, instead: str
) -> None:
    place = Layer(name="up", in_features=K, out_features=N, block=0, blocks=1)
    gpu = Device.elsewhere(find_gpu("B200"))
    with pytest.raises(ValueError, match=f"{instead} runs without.*run it by emulate"):
        resolve(place, recipe, None, backend, gpu)


@pytest.mark.parametrize(
    "recipe", [NVFP4(centred=("x",)), NVFP4(residual=Residual())], ids=["centred", "residual"]
)
@pytest.mark.parametrize("cut", ["in", "out"])
def test_layers_that_are_cut_are_refused_by_name(recipe: Recipe, cut: str) -> None:
    place = Layer(
        name="blocks.0.up", in_features=K, out_features=N, block=0, blocks=1, cut=cut, parts=2
    )
    (words,) = recipe.terms.words(recipe.dtype)
    message = rf"{words} has operands.*parallel\.tp cuts blocks\.0\.up: use parallel\.tp=1"
    with pytest.raises(ValueError, match=message):
        resolve(place, recipe, None, "auto", Device(type="cpu"))


def test_the_products_of_residuals_are_counted_and_shown() -> None:
    place = Layer(name="up", in_features=K, out_features=N, block=0, blocks=1)
    recipe = NVFP4(residual=Residual(tensors=("x", "w"), share=0.1))
    plan = resolve(place, recipe, None, "auto", Device(type="cpu"))
    words = [(gemm.name, gemm.elements, features, gemm.why) for gemm, features in plan.products[3:]]
    assert words == [
        ("fprop", "BF16·E2M1", 7, "residual of x, 7 of 64 in features"),
        ("fprop", "E2M1·BF16", 7, "residual of w, 7 of 64 in features"),
    ]
    high = resolve(place, recipe.with_high_precision("fprop"), None, "auto", Device(type="cpu"))
    assert len(high.products) == 3


def test_parts_of_layers_have_one_term_each() -> None:
    channels = OutlierChannels(recipe=MXFP8())
    with pytest.raises(ValueError, match=r"outliers: operands of two terms.*recipe.centred=\[\]"):
        NVFP4(outliers=channels, centred=("x",))
    with pytest.raises(ValueError, match="fprop=NVFP4 with x centred"):
        Mixed(fprop=NVFP4(centred=("x",)))


def test_the_table_and_the_name_show_the_terms() -> None:
    recipe = MXFP4(centred=["dy", "x"], residual=Residual(spec=PLAIN, share=0.1))  # type: ignore[arg-type]
    assert recipe.centred == ("x", "dy")
    shown = str(recipe)
    assert "with x and dy centred and residual of x in E2M1 of 10%" in recipe.name
    lines = {tuple(line.split()[:2]): line for line in shown.splitlines()[2:]}
    assert "E2M1 + E2M1 of 10%, centred" in lines["fprop", "x"]
    assert "E2M1, centred" in lines["wgrad", "dy"] and "centred" not in lines["dgrad", "w"]
    assert "centred" not in str(NVFP4()) and NVFP4().name == "NVFP4"
