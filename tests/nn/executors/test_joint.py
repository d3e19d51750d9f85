"""Layers that read one x as one product per GEMM, against the same layers apart.

Where operands are small whole numbers every sum is exact in float32, so that the order of additions cannot show: y and
dw must then be equal in every bit, and dx must be the exact sum, rounded once. Of random numbers y and dw may differ in
the last digit of the product's dtype, since a CPU's GEMM may add in another order for another number of columns.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import adding
import pytest
import torch
from joint_layers import CPU, SIZES, TOKENS, K, made, normal, whole, within
from recorded_products import Recorder
from torch import Tensor, nn

import fp4train as f4
from fp4train.backends import emulate, native
from fp4train.precision import BF16, FP32, MXFP8, NVFP4, FP8Block, FP8Row, Mixed, Recipe, recompute
from fp4train.precision.context import use
from fp4train.precision.recipes import MXFP4, MXFP6

RECIPES = [
    *(BF16(), FP32(), MXFP8(), MXFP6(), MXFP4(), FP8Block(), FP8Row(), NVFP4(fused_scales=True)),
    Mixed(fprop=BF16(), dgrad=NVFP4(), wgrad=NVFP4()),
    Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8()),
]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.name)

ADDING_RECIPES = pytest.mark.parametrize(
    "recipe", [BF16(), NVFP4(fused_scales=True).with_high_precision("wgrad")], ids=["all", "wgrad"]
)
"""Recipes whose products add dw: wgrad is in high precision."""


def results(
    model: nn.Module,
    recipe: Recipe,
    values: Callable[..., Tensor] = normal,
    *,
    calls: Callable[..., tuple[Tensor, ...]] | None = None,
    microbatches: int = 1,
    step: int | None = 0,
) -> dict[str, Tensor]:
    """The outputs of the last microbatch, dx, and the gradients of the parameters."""
    model.zero_grad()
    x = values(microbatches, TOKENS, K, seed=11).to(recipe.torch_dtype).requires_grad_()
    for number, own in enumerate(x.unbind()):
        with use(within(recipe, step)):
            ys = (calls or model)(own)
        used = [(y, values(*y.shape, seed=20 + number).to(y.dtype)) for y in ys]
        torch.autograd.backward([y for y, _ in used], [dy for _, dy in used])
    assert x.grad is not None
    found = {"x": x.grad} | {f"y{i}": y.detach() for i, y in enumerate(ys)}
    return found | {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert set(one) == set(other)
    return {name for name in one if not torch.equal(one[name], other[name])}


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@each_recipe
@pytest.mark.parametrize("sums", [False, True])
def test_of_whole_numbers_y_and_dw_are_those_of_the_layers_apart_in_every_bit(recipe: Recipe, sums: bool) -> None:
    """Codes, scales and random bits of each layer's weight and dy are its own, also of stochastic rounding (MXFP4)."""
    apart, joint = (results(made(recipe, joint=each, values=whole, sums=sums), recipe, whole) for each in (False, True))
    assert differing(apart, joint) <= {"x"}
    assert set(joint) == {"x", "y0", "y1", "y2", "wq.weight", "wq.bias", "wk.weight", "wv.weight", "wv.bias"}


@each_recipe
def test_of_random_numbers_only_dx_differs_by_its_roundings(recipe: Recipe) -> None:
    models = [made(recipe, joint=each) for each in (False, True)]
    apart, joint = (results(each, recipe) for each in models)
    for name in set(joint) - {"x"}:  # torch rounds the sum of a bias's gradient to BF16
        rounded = recipe.torch_dtype == torch.bfloat16 and not recipe.quantised and name.endswith("bias")
        assert relative(joint[name], apart[name]) < (2**-8 if rounded else 1e-5), name
    one_product = models[1].wq.executor_in(within(recipe), CPU).plan.dgrad.joint
    assert relative(joint["x"], apart["x"]) < (2**-7 if one_product else 1e-9)


@pytest.mark.parametrize("recipe", [BF16(), MXFP8()], ids=lambda each: each.name)
def test_dx_is_the_sum_over_all_layers_rounded_once(recipe: Recipe) -> None:
    """Whole numbers up to 8 are exact in E4M3, and their sums in float32; the layers apart round four times more."""

    def values(*shape: int, seed: int) -> Tensor:
        return whole(*shape, seed=seed, most=8)

    model = made(recipe, joint=True, values=values)
    found = results(model, recipe, values)["x"][0]
    pairs = zip((model.wq, model.wk, model.wv), SIZES, strict=True)
    exact = sum(values(TOKENS, size, seed=20).double() @ each.weight.double() for each, size in pairs)
    assert isinstance(exact, Tensor) and torch.equal(found, exact.to(torch.bfloat16))
    apart = results(made(recipe, joint=False, values=values), recipe, values)["x"][0]
    assert not torch.equal(apart, found) and relative(apart, found) < 2**-7


def test_dw_in_high_precision_is_added_to_the_gradients_that_weights_have_within_their_gemms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, where each layer's product writes into its gradient from the second microbatch on."""
    apart = results(made(BF16(), joint=False, values=whole, sums=True), BF16(), whole, microbatches=2)
    added = adding.begin(monkeypatch.setattr)
    model = made(BF16(), joint=True, values=whole, sums=True)
    model.wv.weight.requires_grad_(False)
    found = results(model, BF16(), whole, microbatches=2)
    assert added == [(size, K) for size in SIZES[:2]]
    assert not {name for name in set(found) - {"x"} if not torch.equal(found[name], apart[name])}
    assert set(apart) - set(found) == {"wv.weight"}
    added.clear()
    results(made(MXFP8(), joint=True, sums=True), MXFP8(), microbatches=2)
    assert not added, "codes are not multiplied into a sum"


@ADDING_RECIPES
@pytest.mark.parametrize("joint", [False, True])
def test_recomputed_layers_add_dw_within_their_gemms_too_and_all_ways_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, joint: bool
) -> None:
    """Recomputation saves no weights: what backward gets in their place has no gradient to add to."""
    added, found = adding.begin(monkeypatch.setattr), []
    for again, in_product in ((False, False), (False, True), (True, True)):
        model = made(recipe, joint=joint, sums=True, in_product=in_product)

        def calls(x: Tensor, model: Any = model, again: bool = again) -> tuple[Tensor, ...]:
            def joined(x: Tensor) -> Tensor:
                return torch.cat(model(x), dim=1)

            return (recompute(joined, x) if again else joined(x),)

        found.append(results(model, recipe, calls=calls, microbatches=3))
        assert sorted(added) == sorted([(size, K) for size in SIZES] * 2 * in_product), (again, in_product)
        added.clear()
    assert not differing(found[0], found[1]) and not differing(found[0], found[2])


@ADDING_RECIPES
@pytest.mark.parametrize("joint", [False, True])
def test_passes_that_leave_gradients_as_they_are_add_nothing_to_them(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, joint: bool
) -> None:
    """`torch.autograd.grad` of weights that have gradients, of x alone, and backward with `inputs`."""
    added, model = adding.begin(monkeypatch.setattr), made(recipe, joint=joint, sums=True)
    once = {name: each.clone() for name, each in results(model, recipe).items()}
    names = ("wq.weight", "wk.weight", "wv.weight")
    weights = [model.get_parameter(name) for name in names]
    x = normal(1, TOKENS, K, seed=11)[0].bfloat16().requires_grad_()
    dys = [normal(TOKENS, size, seed=20).bfloat16() for size in SIZES]

    def ys() -> Any:
        with use(within(recipe)):
            return model(x)

    assert all(map(torch.equal, torch.autograd.grad(ys(), weights, dys), (once[name] for name in names)))
    assert torch.equal(torch.autograd.grad(ys(), x, dys)[0], once["x"][0])
    torch.autograd.backward(ys(), dys, inputs=[x, weights[1]])
    assert added == ([] if joint else [(SIZES[1], K)])
    for name, each in zip(names, weights, strict=True):
        assert each.grad is not None and torch.equal(each.grad, once[name] * (2 if name == names[1] else 1))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """[M, N, K] of each product of emulated codes."""
    found: list[tuple[int, ...]] = []
    product = emulate.matmul

    def recorded(a: Any, b: Any, **options: Any) -> Tensor:
        found.append((a.values.shape[0], b.values.shape[0], a.values.shape[1]))
        return product(a, b, **options)

    monkeypatch.setattr(emulate, "matmul", recorded)
    yield found


@pytest.mark.parametrize(
    ("recipe", "counts"),
    [(BF16(), (1, 1, 1)), (MXFP8(), (1, 1, 1)), (FP8Row(), (1, 3, 1)), (NVFP4(fused_scales=True), (1, 3, 3))],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_gemm_of_all_layers_is_one_product_where_the_plan_says_so(
    products: list[tuple[int, ...]], recipe: Recipe, counts: tuple[int, ...]
) -> None:
    results(made(recipe, joint=True), recipe)
    assert len(products) == sum(counts)
    assert products[0] == (TOKENS, sum(SIZES), K)
    if counts == (1, 1, 1):
        assert products[1:] == [(TOKENS, K, sum(SIZES)), (sum(SIZES), K, TOKENS)]


@pytest.mark.parametrize("recipe", [MXFP8(), FP8Block()], ids=lambda each: each.name)
def test_tensor_cores_get_one_product_per_gemm_in_the_layouts_that_they_take(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(native, "why_not_blocks", lambda *_: None)
    monkeypatch.setattr(native.F, "scaled_mm", recorder)
    found = results(made(recipe, joint=True, values=whole, backend="native"), recipe, whole)
    n = sum(SIZES)
    assert [each.extents for each in recorder.calls] == [(TOKENS, n, K), (TOKENS, K, n), (n, K, TOKENS)]
    emulated = results(made(recipe, joint=True, values=whole, backend="emulate"), recipe, whole)
    assert not differing(found, emulated)


def test_codes_of_random_bits_are_joined_for_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4 whose weights share their scale: dy of each layer is quantised for itself, w in tiles."""
    recorder = Recorder()
    monkeypatch.setattr(native, "why_not_blocks", lambda *_: None)
    monkeypatch.setattr(native.F, "scaled_mm", recorder)
    recipe = NVFP4(fused_scales=True)
    found = [results(made(recipe, joint=each, values=whole, backend="native"), recipe, whole) for each in (True, False)]
    assert len(recorder.calls) == (1 + 3 + 3) + 9
    assert all(relative(joint, found[1][name]) < 1e-3 for name, joint in found[0].items())


def test_an_output_that_nothing_used_has_no_gradient(products: list[tuple[int, ...]]) -> None:
    recipe = MXFP8()
    apart, joint = (made(recipe, joint=each, values=whole) for each in (False, True))

    def two(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def call(x: Tensor) -> tuple[Tensor, ...]:
            y, _, other = model(x)
            return y, other

        return call

    one, other = (results(each, recipe, whole, calls=two(each)) for each in (apart, joint))
    assert differing(one, other) <= {"x"} and "wk.weight" not in other
    assert products[-2:] == [(TOKENS, K, SIZES[0] + SIZES[2]), (SIZES[0] + SIZES[2], K, TOKENS)]


@pytest.mark.parametrize("recipe", [BF16(), MXFP8()], ids=lambda each: each.name)
def test_layers_that_are_called_in_another_way_are_right(recipe: Recipe) -> None:
    def alone(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return lambda x: (model.wk(x),)

    def other_order(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return lambda x: (model.wv(x), model.wq(x), model.wk(x))

    def other_inputs(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return lambda x: (model.wq(x), model.wk(2 * x), model.wv(x.clone()))

    def twice(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return lambda x: (*model(x), *model(x))

    def changed(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        def call(x: Tensor) -> tuple[Tensor, ...]:
            x = 1 * x
            y = model.wq(x)
            return y, model.wk(x.add_(1)), model.wv(x)

        return call

    def of_other_graphs(model: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The same memory: dx must not count what a detached x gives, and calls without gradients have none."""

        def call(x: Tensor) -> tuple[Tensor, ...]:
            x = x.view(1, *x.shape)
            with torch.no_grad():
                model.wq(x)
                without = x.view(x.shape)
            first = model.wk(x)[0], model.wq(x)[0], model.wk(x.detach())[0], model.wv(x.detach().requires_grad_())[0]
            return *first, model.wq(x)[0], model.wk(without)[0], model.wv(x)[0]

        return call

    ways = (alone, other_order, other_inputs, twice, of_other_graphs, *((changed,) if recipe.quantised else ()))
    for way in ways:
        found = []
        for each in (False, True):
            model = made(recipe, joint=each, values=whole)
            found.append(results(model, recipe, whole, calls=way(model)))
        apart, joint = found
        assert differing(apart, joint) <= {"x"}, way.__name__
        assert relative(joint["x"], apart["x"]) < 2**-7, way.__name__


@each_recipe
def test_evaluation_computes_the_outputs_of_training(recipe: Recipe) -> None:
    model, x = made(recipe, joint=True), normal(2, 64, K, seed=3).to(recipe.torch_dtype)
    with use(within(recipe)):
        wanted = model(x.requires_grad_())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), use(within(recipe)):
            assert all(relative(a, b) < 1e-5 for a, b in zip(model(x.detach()), wanted, strict=True))


@pytest.mark.parametrize("recipe", [BF16(), MXFP8(), MXFP4()], ids=lambda each: each.name)
def test_gradients_of_microbatches_are_summed_in_float32(recipe: Recipe) -> None:
    options: dict[str, Any] = {"values": whole, "sums": True}
    one, other = (results(made(recipe, joint=each, **options), recipe, whole, microbatches=3) for each in (False, True))
    assert differing(one, other) <= {"x"}
    grad = results(made(recipe, joint=True, sums=True), recipe)["wq.weight"]
    assert not torch.equal(grad, grad.bfloat16().float()), "dw is no rounded product"


@pytest.mark.parametrize("recipe", [BF16(), MXFP4(), NVFP4(fused_scales=True)], ids=lambda each: each.name)
@pytest.mark.parametrize("step", [0, None])
def test_recomputed_layers_have_the_bits_of_those_that_are_not(recipe: Recipe, step: int | None) -> None:
    found = []
    for again in (False, True):
        model = made(recipe, joint=True)

        def calls(x: Tensor, model: Any = model, again: bool = again) -> tuple[Tensor, ...]:
            def joined(x: Tensor) -> Tensor:
                return torch.cat(model(x), dim=1)

            return (recompute(joined, x) if again else joined(x),)

        found.append(results(model, recipe, calls=calls, step=step))
    assert not differing(*found)


def test_weights_are_joined_once_per_step_and_share_the_memory_of_their_own_forms() -> None:
    recipe = NVFP4(fused_scales=True)
    model = made(recipe, joint=True)
    results(model, recipe)
    prepared = model.wq._prepared[None]
    kept = {str(key[0]): form for key, form in prepared._forms}
    results(model, recipe, microbatches=2)
    assert {str(key[0]): form for key, form in prepared._forms} == kept, "the objects are the same"
    memory = {
        form.values.untyped_storage().data_ptr()
        for each in (model.wq, model.wk, model.wv)
        for _, form in each._prepared[None]._forms
    }
    assert len(memory) == 1, "dgrad multiplies rows of what fprop does"
    before = results(model, recipe)["y1"]
    with torch.no_grad():
        model.wk.weight.mul_(2)
    after = results(model, recipe)["y1"]
    assert relative(after, 2 * before) < 0.2 < relative(after, before), "a weight that changed is prepared again"
    results(model, recipe, step=1)
    assert prepared._position == (1, 1) and len(prepared._forms) == len(kept)


def test_a_context_that_ends_frees_outputs_that_no_layer_asked_for() -> None:
    model, recipe = made(BF16(), joint=True), BF16()
    context = within(recipe)
    with use(context):
        y = model.wq(normal(8, K, seed=1).bfloat16())
        waiting = [weakref.ref(each) for each in context.shared["joint wq"].outputs.values()]
        assert len(waiting) == 2 and all(each() is not None for each in waiting)
    assert not context.shared and all(each() is None for each in waiting) and y.shape == (8, SIZES[0])


def test_a_copy_of_one_layer_and_a_model_of_other_weights_run() -> None:
    recipe = MXFP8()
    model = made(recipe, joint=True)
    x = normal(TOKENS, K, seed=1).bfloat16()
    with use(within(recipe)):
        wanted = model(x)
    own = copy.deepcopy(model)
    alone = copy.deepcopy(model.wq)
    with f4.autocast(recipe, seed=1, step=0, token_offset=0):
        assert torch.equal(alone(x), wanted[0])
        assert all(torch.equal(a, b) for a, b in zip(own(x), wanted, strict=True))


def test_one_layer_without_its_weights_gradient_leaves_those_of_the_others() -> None:
    recipe, found = MXFP8(), []
    for each in (False, True):
        model = made(recipe, joint=each, values=whole)
        model.wk.weight.requires_grad_(False)
        found.append(results(model, recipe, whole))
    assert differing(*found) <= {"x"} and "wk.weight" not in found[1]
