"""The linear layer equals a composition of `quantize` and explicit products, for every recipe."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fp4train.backends import cpu_multiplies_rows
from fp4train.nn import LayerCall, Linear, TensorForms
from fp4train.nn.executors import Gemms
from fp4train.precision import (
    BF16,
    FP16,
    FP32,
    MXFP4,
    MXFP6,
    MXFP8,
    NVFP4,
    Context,
    Custom,
    FP8Block,
    FP8Current,
    FP8Row,
    Layer,
    Mixed,
    Operands,
    QuartetII,
    Recipe,
    TetraJetV2,
    autocast,
)
from fp4train.quantize import (
    Hadamard,
    Position,
    QuantSpec,
    RandomKey,
    RunStep,
    quantize,
    random_bits,
)

rows_on_cpu = pytest.mark.skipif(
    not cpu_multiplies_rows(), reason="this torch multiplies no rows on CPUs"
)
SEED = 11
STEP = 5
NAME = "blocks.0.mlp.up"
STOCHASTIC_WEIGHTS = Custom(
    label="stochastic weights",
    fprop=Operands(first=QuantSpec(), second=QuantSpec(rounding="stochastic")),
    dgrad=Operands(first=QuantSpec(), second=QuantSpec(rounding="stochastic")),
    wgrad=Operands(first=QuantSpec(rounding="stochastic"), second=QuantSpec(rounding="stochastic")),
)
SQUARE_STOCHASTIC = QuantSpec(block=(16, 16), rounding="stochastic")
MX = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
MX_AGAIN = replace(MX, requantises=MX)
MX_TURNED = replace(MX, hadamard=Hadamard())
RECIPES = [
    BF16(),
    FP16(),
    FP32(),
    NVFP4(),
    NVFP4(hadamard=False),
    NVFP4(stochastic_rounding=False),
    NVFP4(two_d_weights=False),
    NVFP4(row_scaled_activation=True),
    NVFP4(four_over_six="weights"),
    NVFP4(four_over_six="all", hadamard=False),
    NVFP4(formula="te2.13"),
    NVFP4(guard=16 / 17),
    NVFP4(dtype="float32"),
    NVFP4(dtype="float16"),
    NVFP4().with_high_precision("fprop"),
    NVFP4().with_high_precision("dgrad", "wgrad"),
    MXFP8(),
    MXFP8(element="hybrid", two_d_weights=True),
    MXFP6(),
    MXFP4(),
    FP8Current(),
    FP8Current(power_of_two=True, element="e4m3"),
    FP8Row(),
    FP8Block(),
    FP8Block(power_of_two=False, element="hybrid"),
    Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=FP8Row()),
    STOCHASTIC_WEIGHTS,
    Custom(
        label="stochastic square weights",
        fprop=Operands(first=QuantSpec(), second=SQUARE_STOCHASTIC),
        dgrad=Operands(first=QuantSpec(), second=SQUARE_STOCHASTIC),
    ),
    QuartetII(),
    TetraJetV2(),
    Custom(
        label="nearest, again",
        fprop=Operands(first=MX, second=MX),
        wgrad=Operands(first=MX, second=MX_AGAIN),
    ),
    Custom(
        label="transformed, undone, again",
        fprop=Operands(first=MX_TURNED, second=MX_TURNED),
        dgrad=Operands(first=MX, second=replace(MX, requantises=MX_TURNED)),
        wgrad=Operands(first=MX, second=replace(MX, requantises=MX_TURNED)),
    ),
]
# tokens, in, out
SHAPES = {"fills blocks": (32, 48, 64), "fills no block": (5, 7, 9), "one token": (1, 16, 3)}


def make(
    recipe: Recipe, backend: str, shape: tuple[int, int, int], *, bias: bool = True
) -> tuple[Linear, Tensor, Tensor]:
    tokens, k, n = shape
    generator = torch.Generator().manual_seed(0)
    name = Layer(name=NAME, in_features=k, out_features=n, block=0, blocks=1)
    layer = Linear(k, n, bias, layer=name, backend=backend)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    x = torch.randn(tokens, k, generator=generator).to(recipe.torch_dtype)
    dy = torch.randn(tokens, n, generator=generator).to(recipe.torch_dtype) * 1e-3
    return layer, x, dy


def run(layer: Linear, x: Tensor, dy: Tensor, recipe: Recipe, **options: int) -> tuple[Tensor, ...]:
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(recipe, seed=SEED, step=STEP, **{"token_offset": 0, **options}):  # type: ignore[arg-type]
        y = layer(x)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    found = (y.detach(), x.grad, layer.weight.grad)
    return found if layer.bias is None else (*found, layer.bias.grad)  # type: ignore[return-value]


def by_hand(layer: Linear, x: Tensor, dy: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
    """The formulas of `fp4train.nn.executors.gemms`, in float64 products of dequantised tensors."""
    import zlib

    def q(tensor: Tensor, spec: QuantSpec | None, operand: int) -> Tensor:
        if spec is None:
            return tensor.to(recipe.torch_dtype).double()
        key = RandomKey(seed=SEED, step=STEP, layer=zlib.crc32(NAME.encode()), operand=operand)
        operand_ = quantize(tensor, spec, key=key, kernel="reference").decoded()
        values = operand_.values.double()
        return values if operand_.scale is None else values * operand_.scale.double()

    table = recipe.table()
    w = layer.weight.detach()
    y = q(x, table["fprop"].first, 0) @ q(w, table["fprop"].second, 1).T
    square = table["dgrad"].second is None or table["dgrad"].second.transposable
    w_t = q(w, table["dgrad"].second, 1).T if square else q(w.T, table["dgrad"].second, 3)
    dx = q(dy, table["dgrad"].first, 2) @ w_t.T
    dw = q(dy.T, table["wgrad"].first, 4) @ q(x.T, table["wgrad"].second, 5).T
    if layer.bias is not None:
        y = y + layer.bias.detach().to(recipe.torch_dtype).double()
    return y, dx, dw, dy.double().sum(0)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}
"""Half a unit in the last place of the output dtype, relative; float32: the order of a few dozen
additions.
"""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_forward_and_backward_are_three_products_of_quantised_operands(
    recipe: Recipe, backend: str, shape: tuple[int, int, int]
) -> None:
    layer, x, dy = make(recipe, backend, shape)
    found = run(layer, x, dy, recipe)
    expected = by_hand(layer, x, dy, recipe)
    for name, a, b in zip(("y", "dx", "dw", "db"), found, expected, strict=True):
        # One rounding of the exact result: elementwise, with room for the order of additions in
        # sums that cancel.
        room = ROUNDING[recipe.torch_dtype] * b.abs() + 1e-5 * b.abs().max() * (
            recipe.torch_dtype != torch.float32
        )
        room = (
            room
            if recipe.torch_dtype != torch.float32
            else torch.full_like(b, 2e-6 * float(b.abs().max()))
        )
        tiny = 2.0**-25 if recipe.torch_dtype == torch.float16 else 0.0  # float16's subnormals
        assert a.shape == b.shape
        assert bool(((a.double() - b).abs() <= room + tiny).all()), (name, relative(a, b))


@pytest.mark.parametrize(
    "recipe",
    [FP8Current(), FP8Current(power_of_two=True), pytest.param(FP8Row(), marks=rows_on_cpu)],
    ids=lambda r: r.name,
)
def test_scaled_mm_equals_emulation_up_to_the_last_bit(recipe: Recipe) -> None:
    shape = SHAPES["fills blocks"]
    found = [run(*make(recipe, backend, shape), recipe) for backend in ("native", "emulate")]
    for native, emulated in zip(*found, strict=True):
        # Both round a float32 sum of exact products once; near a tie the order of addition may
        # change one bit.
        assert bool(
            (
                (native - emulated).abs() <= 2**-8 * emulated.abs() + 1e-6 * emulated.abs().max()
            ).all()
        )
        assert relative(native, emulated) < 1e-3


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8(), FP8Current()], ids=lambda r: r.name)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e12, 1e30])
def test_the_scale_of_the_input_does_not_matter(recipe: Recipe, magnitude: float) -> None:
    """Global scales far from one are applied one after the other, since their product may leave the
    float32 range.
    """
    layer, x, dy = make(recipe, "emulate", SHAPES["fills blocks"], bias=False)
    factor = 2.0 ** round(torch.tensor(magnitude).log2().item())
    expected = run(layer, x.float(), dy.float(), recipe)[0].double()
    found = run(layer, x.float() * factor, dy.float(), recipe)[0].double() / factor
    assert relative(found, expected) < 5e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "recipe",
    [r for r in RECIPES if r.dtype == "bfloat16"],
    ids=lambda r: r.name,
)
def test_non_finite_input_reaches_the_output_and_the_gradients(recipe: Recipe, bad: float) -> None:
    shape = SHAPES["fills blocks"]
    layer, x, dy = make(recipe, "emulate", shape)
    x[3, 5] = bad
    y, dx, dw, _ = run(layer, x, dy, recipe)
    assert not y[3].isfinite().all()
    assert not dw.isfinite().all()
    assert dx.isfinite().all(), "dx does not depend on x"
    layer, x, dy = make(recipe, "emulate", shape)
    dy[3, 5] = bad
    _, dx, dw, db = run(layer, x, dy, recipe)
    assert not dx[3].isfinite().all()
    assert not dw.isfinite().all()
    assert not db.isfinite().all()


def test_a_non_finite_weight_reaches_the_output() -> None:
    for recipe in (NVFP4(), MXFP8(), FP8Current(), FP8Block()):
        layer, x, dy = make(recipe, "emulate", SHAPES["fills blocks"])
        with torch.no_grad():
            layer.weight[0, 0] = float("nan")
        y, dx, *_ = run(layer, x, dy, recipe)
        assert not y.isfinite().all()
        assert not dx.isfinite().all()


def test_stochastic_rounding_of_gradients_is_unbiased_with_the_guard() -> None:
    """The mean over 400 seeds is within 5 standard errors of the exact dx and dw; nearest
    rounding's error is not.
    """
    tokens = 32
    k = 16
    n = 16
    draws = 400
    recipe = NVFP4(guard=16 / 17, hadamard=False, two_d_weights=False)
    exact = Custom(
        dgrad=Operands(second=recipe.table()["dgrad"].second),
        wgrad=Operands(second=recipe.table()["wgrad"].second),
    )
    layer, x, dy = make(recipe, "emulate", (tokens, k, n), bias=False)
    target = [t.double() for t in by_hand(layer, x, dy, exact)[1:3]]
    samples: list[list[Tensor]] = [[], []]
    for seed in range(draws):
        leaf = x.clone().requires_grad_()
        with autocast(
            NVFP4(guard=16 / 17, hadamard=False, two_d_weights=False, dtype="float32"),
            seed=seed,
            step=0,
        ):
            y = layer(leaf.float())
        layer.zero_grad()
        y.backward(dy.float())
        assert leaf.grad is not None and layer.weight.grad is not None
        # dx has x's dtype, BF16, whose rounding is far below the noise.
        samples[0].append(leaf.grad.double())
        samples[1].append(layer.weight.grad.double())
    for found, goal in zip(samples, target, strict=True):
        stack = torch.stack(found)
        error = (stack.mean(0) - goal) / (
            stack.std(0) / draws**0.5 + 2**-9 * goal.abs() / draws**0.5 + 1e-12
        )
        assert float(error.abs().max()) < 5.5
        assert abs(float(error.mean())) < 0.35, "no common direction"


def gradient_operand(layer: Linear, context: Context) -> tuple[TensorForms, LayerCall]:
    """What prepares dy of `layer`, and a call."""
    executor = layer.executor_in(context, torch.device("cpu"))
    assert isinstance(executor, Gemms)
    return executor.dy, layer.new_call(context, executor, 0, training=True)


def test_random_bits_do_not_depend_on_how_the_batch_is_cut() -> None:
    """Microbatches of 16 and 8 tokens draw what the whole batch of 32 draws for the same tokens."""
    layer, *_ = make(NVFP4(), "emulate", SHAPES["fills blocks"])

    def bits(offset: int, tokens: int) -> tuple[Tensor, Tensor]:
        context = Context(
            recipe=NVFP4(), position=Position(RunStep(3, 9), offset), counts="nothing"
        )
        dy, call = gradient_operand(layer, context)
        return random_bits(dy.row.key(call, tokens), tokens, 64), random_bits(
            dy.column.key(call, tokens), 64, tokens
        )

    whole = bits(0, 32)
    for offset, tokens in ((0, 16), (16, 16), (8, 8), (24, 8)):
        rows, columns = bits(offset, tokens)
        assert torch.equal(rows, whole[0][offset : offset + tokens])
        assert torch.equal(columns, whole[1][:, offset : offset + tokens])


def test_microbatches_of_odd_sizes_never_share_random_bits() -> None:
    """Sequences of 7 tokens: no two of 64 microbatches may draw the same column bits, or their
    errors would add up.
    """
    layer, *_ = make(NVFP4(), "emulate", SHAPES["fills blocks"])
    groups: list[int] = []
    for index in range(64):
        context = Context(
            recipe=NVFP4(), position=Position(RunStep(0, 0), 7 * index), counts="nothing"
        )
        dy, call = gradient_operand(layer, context)
        groups.append(dy.column.key(call, 7).col_offset // 8)
    assert len(set(groups)) == 64


def test_every_operand_layer_step_and_seed_has_bits_of_its_own() -> None:
    shape = SHAPES["fills blocks"]
    layer, x, dy = make(STOCHASTIC_WEIGHTS, "emulate", shape)
    base = run(layer, x, dy, STOCHASTIC_WEIGHTS)
    with autocast(STOCHASTIC_WEIGHTS, seed=SEED, step=STEP + 1):
        assert not torch.equal(layer(x), base[0])
    with autocast(STOCHASTIC_WEIGHTS, seed=SEED + 1, step=STEP):
        assert not torch.equal(layer(x), base[0])
    layer.rename(Layer(name="other", in_features=48, out_features=64, block=0, blocks=1), "emulate")
    assert not torch.equal(run(layer, x, dy, STOCHASTIC_WEIGHTS)[0], base[0])
    layer.rename(Layer(name=NAME, in_features=48, out_features=64, block=0, blocks=1), "emulate")
    assert all(
        torch.equal(a, b) for a, b in zip(run(layer, x, dy, STOCHASTIC_WEIGHTS), base, strict=True)
    )
