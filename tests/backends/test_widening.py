"""On a CPU without BF16 or FP16 instructions, products run in float32 and are rounded once;
elsewhere torch's own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended import Machine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp4train as f4
from fp4train.backends import matmul, widened
from fp4train.models.llama import Llama
from fp4train.precision import BF16, FP16, FP32, NVFP4, Recipe, autocast
from fp4train.quantize import Decoded

HALVES = (torch.bfloat16, torch.float16)
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


@pytest.fixture
def bare_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies neither BF16 nor FP16."""
    Machine(monkeypatch).lacks_instructions_for(*HALVES)


@pytest.fixture
def able_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies both."""
    Machine(monkeypatch).lacks_instructions_for()


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[Tensor | None]]] = {
    "linear": (F.linear, [rand(7, 33), rand(9, 33, seed=1), None]),
    "linear with bias": (F.linear, [rand(7, 33), rand(9, 33, seed=1), rand(9, seed=2)]),
    "mm": (torch.mm, [rand(7, 33), rand(33, 9, seed=1)]),
    "attention": (
        attention,
        [rand(2, 4, 12, 8), rand(2, 2, 12, 8, seed=1), rand(2, 2, 12, 8, seed=2)],
    ),
}


@pytest.mark.usefixtures("bare_cpu")
@each_half
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_and_gradients_are_float32s_rounded_once(name: str, dtype: torch.dtype) -> None:
    product, values = PRODUCTS[name]
    halves = [None if v is None else v.to(dtype).requires_grad_() for v in values]
    floats = [None if h is None else h.detach().float().requires_grad_() for h in halves]
    found = widened(product, *halves)
    expected = product(*floats)
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))
    dy = rand(*found.shape, seed=9).to(dtype)
    gradients = torch.autograd.grad(found, [h for h in halves if h is not None], dy)
    wide = torch.autograd.grad(expected, [f for f in floats if f is not None], dy.float())
    for half, exact in zip(gradients, wide, strict=True):
        assert half.dtype == dtype
        assert torch.equal(half, exact.to(dtype))


@pytest.mark.usefixtures("bare_cpu")
def test_float16_overflows_to_infinity_forward_and_backward() -> None:
    """Loss scaling depends on overflow: 64 · 40² and 64 · 2000 · 40 exceed 65504, but not the range
    of float32.
    """
    x, w = (torch.full((2, 64), 40.0).half().requires_grad_() for _ in range(2))
    y = widened(F.linear, x, w)
    assert y.dtype == torch.float16 and y.isposinf().all()
    dx, dw = torch.autograd.grad(
        y, (x, w), torch.tensor([[-2000.0], [-2000.0]]).half().expand(2, 2)
    )
    assert dx.dtype == dw.dtype == torch.float16
    assert dx.isneginf().all() and dw.isneginf().all()


@each_half
@pytest.mark.usefixtures("able_cpu")
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_cpu_with_the_instructions_gets_the_operands_as_they_are(
    name: str, dtype: torch.dtype
) -> None:
    product, values = PRODUCTS[name]
    halves = [None if v is None else v.to(dtype) for v in values]
    seen: list[Tensor | None] = []

    def spy(*operands: Tensor | None) -> Tensor:
        seen.extend(operands)
        return product(*operands)

    found = widened(spy, *halves)
    assert all(a is b for a, b in zip(seen, halves, strict=True))
    assert torch.equal(found, product(*halves))


@pytest.mark.usefixtures("bare_cpu")
@pytest.mark.parametrize(
    "x", [rand(4, 8), rand(4, 8).double(), torch.empty(4, 8, dtype=torch.float16, device="meta")]
)
def test_wide_operands_and_other_devices_are_left_alone(x: Tensor) -> None:
    seen: list[Tensor] = []
    widened(lambda a, b: seen.extend((a, b)) or F.linear(a, b), x, x)
    assert seen[0] is seen[1] is x


@pytest.mark.usefixtures("bare_cpu")
@each_half
@pytest.mark.parametrize("scale", [None, torch.tensor(0.37)])
def test_the_emulated_product_is_float32s_too(dtype: torch.dtype, scale: Tensor | None) -> None:
    a = rand(7, 33).to(dtype)
    b = rand(9, 33, seed=1).to(dtype)
    bias = rand(9, seed=2).to(dtype)
    exact = a.double() @ b.double().T * (1.0 if scale is None else scale.double()) + bias.double()
    found = matmul(Decoded(a, scale), Decoded(b, None), out_dtype=dtype, bias=bias).double()
    unit = torch.finfo(dtype).eps / 2
    assert bool(((found - exact).abs() <= 1.01 * unit * exact.abs() + 1e-5).all())


class Products(TorchDispatchMode):
    """Records the dtypes that torch multiplies in, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("mm", "attention", "linear", "matmul")):
            self.dtypes |= {x.dtype for x in args if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "recipe",
    [FP16(), BF16(), NVFP4(), NVFP4(dtype="float16"), NVFP4().with_high_precision("fprop")],
    ids=lambda recipe: recipe.name,
)
@pytest.mark.parametrize("cpu", ["bare_cpu", "able_cpu"])
def test_no_product_of_a_training_step_runs_in_what_the_cpu_lacks(
    recipe: Recipe, cpu: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(cpu)
    torch.manual_seed(0)
    model = f4.convert(Llama(width=32, layers=2).build(vocab_size=64, seq_len=16))
    tokens = torch.randint(0, 64, (2, 16))
    with Products() as products:
        with autocast(recipe, step=0):
            loss = model(tokens, tokens)
        loss.backward()
        with torch.no_grad(), autocast(recipe, step=0):
            assert model(tokens).dtype == recipe.torch_dtype
    assert (recipe.torch_dtype in products.dtypes) == (cpu == "able_cpu")
    assert torch.float32 in products.dtypes or cpu == "able_cpu"


@pytest.mark.usefixtures("bare_cpu")
@pytest.mark.parametrize("recipe", [FP16(), BF16()], ids=lambda recipe: recipe.name)
def test_a_model_without_the_instructions_stays_near_float32(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = f4.convert(Llama(width=32, layers=2).build(vocab_size=64, seq_len=16))
    tokens = torch.randint(0, 64, (2, 16))
    found = []
    for each in (recipe, FP32()):
        model.zero_grad()
        with autocast(each, step=0):
            loss = model(tokens, tokens)
        (loss * 1024).backward()
        found.append((loss.detach() * 1024, *(p.grad for p in model.parameters())))
    bound = 2e-2 if recipe.dtype == "bfloat16" else 3e-3
    for half, exact in zip(*found, strict=True):
        assert half.dtype == torch.float32, "loss and masters' gradients"
        assert float((half - exact).norm()) <= bound * float(exact.norm())


@pytest.mark.usefixtures("bare_cpu")
def test_torch_compile_traces_it_without_a_break() -> None:
    torch._dynamo.reset()
    x = rand(4, 8).half()
    w = rand(3, 8, seed=1).half()
    compiled = torch.compile(lambda a, b: widened(F.linear, a, b), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, w), widened(F.linear, x, w))
