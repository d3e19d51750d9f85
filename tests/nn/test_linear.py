"""The linear layer in all uses that a model may make of it."""

import copy
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp4train as f4
from fp4train.nn import Linear
from fp4train.nn.weights import PreparedWeights, WeightForm
from fp4train.precision import BF16, FP16, FP32, MXFP8, NVFP4, FP8Current, FP8Row, Recipe, autocast
from fp4train.quantize.random import FPROP_W

RECIPES = [BF16(), NVFP4(), MXFP8(), FP8Current(), FP8Row()]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(k: int = 32, n: int = 48, *, bias: bool = True, backend: str = "auto") -> Linear:
    torch.manual_seed(1)
    return Linear(k, n, bias, backend=backend)


def gradients(module: nn.Module, x: Tensor, recipe: Recipe, *, step: int | None = 0) -> tuple[Tensor, ...]:
    """y, dx and the parameters' gradients."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with autocast(recipe, step=step, token_offset=0):
        y = module(x)
    (y * rand(*y.shape, seed=9).to(y.dtype)).sum().backward()
    assert x.grad is not None
    return (y.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None))


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@each_recipe
@pytest.mark.parametrize("shape", [(32,), (6, 32), (2, 3, 32), (1, 2, 3, 32)])
def test_leading_dimensions_are_those_of_the_input(recipe: Recipe, shape: tuple[int, ...]) -> None:
    module, x = layer(), rand(6, 32)[: torch.Size(shape[:-1]).numel()].reshape(shape)
    y, dx, dw, db = gradients(module, x, recipe)
    assert y.shape == (*shape[:-1], 48)
    assert dx.shape == shape
    flat = gradients(module, x.reshape(-1, 32), recipe)
    assert torch.equal(y.reshape(-1, 48), flat[0])
    assert db.shape == (48,) and dw.shape == (48, 32)


@each_recipe
@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
@pytest.mark.parametrize("backend", ["auto", "emulate", "reference"])
def test_an_empty_batch_has_empty_output_and_zero_gradients(
    recipe: Recipe, shape: tuple[int, ...], backend: str
) -> None:
    y, dx, dw, db = gradients(layer(backend=backend), torch.empty(shape), recipe)
    assert y.shape == (*shape[:-1], 48)
    assert dx.shape == shape
    assert not dw.any() and not db.any()


@each_recipe
@pytest.mark.parametrize(("tokens", "k", "n"), [(5, 7, 9), (1, 1, 1), (17, 33, 15)])
def test_no_size_is_refused(recipe: Recipe, tokens: int, k: int, n: int) -> None:
    module = layer(k, n)
    x = rand(tokens, k)
    y, dx, dw, db = gradients(module, x, recipe)
    exact = gradients(module, x, FP32())
    for a, b in zip((y, dx, dw, db), exact, strict=True):
        assert float((a - b).norm()) <= 0.35 * float(b.norm()) + 1e-6


@each_recipe
def test_without_bias_there_is_no_bias(recipe: Recipe) -> None:
    module = layer(bias=False)
    assert len(gradients(module, rand(4, 32), recipe)) == 3


@each_recipe
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode_give_the_same_output(recipe: Recipe, mode: Callable[[], object]) -> None:
    module, x = layer(), rand(4, 32)
    with mode(), autocast(recipe, step=0):  # type: ignore[attr-defined]
        y = module(x)
    assert not y.requires_grad
    assert torch.equal(y, gradients(module, x, recipe)[0]), "and what was prepared there serves training afterwards"


def test_a_model_made_in_inference_mode_runs() -> None:
    with torch.inference_mode():
        module = layer()
        with autocast(NVFP4(), step=0):
            assert torch.equal(module(rand(4, 32)), module(rand(4, 32)))


@each_recipe
@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(recipe: Recipe, frozen: str) -> None:
    module, x = layer(), rand(16, 32)
    _, dx, dw, db = gradients(module, x, recipe)
    module.zero_grad()
    if frozen != "input":
        getattr(module, frozen).requires_grad_(False)
    leaf = x.clone().requires_grad_(frozen != "input")
    with autocast(recipe, step=0, token_offset=0):
        y = module(leaf)
    (y * rand(*y.shape, seed=9)).sum().backward()
    found = {"input": leaf.grad, "weight": module.weight.grad, "bias": module.bias.grad}
    for (name, grad), expected in zip(found.items(), (dx, dw, db), strict=True):
        assert grad is None if name == frozen else torch.equal(grad, expected)  # type: ignore[arg-type]


@each_recipe
def test_gradients_accumulate_over_microbatches(recipe: Recipe) -> None:
    module, parts = layer(), (rand(16, 32), rand(16, 32, seed=1))
    single = [gradients(module, part, recipe)[2:] for part in parts]
    module.zero_grad()
    for part in parts:
        with autocast(recipe, step=0, token_offset=0):
            y = module(part.clone().requires_grad_())
        (y * rand(*y.shape, seed=9)).sum().backward()
    assert torch.equal(module.weight.grad, single[0][0] + single[1][0])  # type: ignore[arg-type]


@each_recipe
@pytest.mark.parametrize(
    "view",
    [
        lambda: rand(32, 8).T,
        lambda: rand(8, 64)[:, ::2],
        lambda: rand(4, 2, 32).transpose(0, 1),
        lambda: rand(1, 32).expand(8, 32),
        lambda: rand(8, 40)[:, 3:35],
    ],
    ids=["transposed", "strided", "batch transposed", "expanded", "sliced"],
)
def test_strides_do_not_matter(recipe: Recipe, view: Callable[[], Tensor]) -> None:
    module, x = layer(), view()
    with autocast(recipe, step=0):
        y, contiguous = module(x), module(x.contiguous())
    assert torch.equal(y, contiguous)
    leaf = x.detach().clone().requires_grad_()
    found = []
    for y_like in (lambda y: y.sum(), lambda y: (y * torch.ones_like(y)).sum()):  # an expanded dy, and a dense one
        module.zero_grad()
        leaf.grad = None
        with autocast(recipe, step=0):
            y = module(leaf)
        y_like(y).backward()
        found.append((leaf.grad, module.weight.grad))
    assert same(*found)  # type: ignore[arg-type]


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_and_gradient_have_the_inputs_dtype(recipe: Recipe, dtype: torch.dtype) -> None:
    module = layer()
    y, dx, dw, _ = gradients(module, rand(8, 32).to(dtype), recipe)
    assert y.dtype == dx.dtype == dtype
    assert dw.dtype == torch.float32, "gradients of float32 masters are float32"


@each_recipe
def test_under_torchs_autocast_the_output_has_its_dtype(recipe: Recipe) -> None:
    module, x = layer(), rand(8, 32)
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe, step=0):
        y = module(x)
    assert y.dtype == torch.bfloat16
    with autocast(recipe, step=0):
        assert torch.equal(y, module(x).bfloat16()), "torch.autocast casts none of the operands once more"


QUANTISED = [recipe for recipe in RECIPES if recipe.quantised]


@pytest.mark.parametrize("recipe", [*QUANTISED, NVFP4(row_scaled_activation=True)], ids=lambda r: r.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_inside_of_torchs_autocast_is_not_cast(recipe: Recipe, dtype: torch.dtype) -> None:
    found = []
    for enabled in (False, True):
        module, x = layer(), rand(8, 32).requires_grad_()
        with autocast(recipe, step=0):
            y = module(x)
        with torch.autocast("cpu", dtype, enabled=enabled):
            y.backward(rand(8, 48, seed=2))
        found.append((x.grad, module.weight.grad, module.bias.grad))
    assert same(*found)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_in_half_precision_and_moved_afterwards(dtype: torch.dtype) -> None:
    module = layer()
    with autocast(NVFP4(), step=0, token_offset=0):
        module(rand(8, 32))  # caches forms of the old weights
    module.to(dtype)
    _, _, dw, _ = gradients(module, rand(8, 32).to(dtype), NVFP4())
    assert dw.dtype == dtype
    fresh = layer().to(dtype)
    assert torch.equal(dw, gradients(fresh, rand(8, 32).to(dtype), NVFP4())[2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool], ids=str)
def test_an_input_that_is_no_floating_number_is_refused_as_by_nn_linear(dtype: torch.dtype) -> None:
    module = f4.convert(nn.Linear(32, 16))
    x = torch.ones(4, 32).to(dtype)
    with pytest.raises(RuntimeError):
        nn.Linear(32, 16)(x)
    with autocast(NVFP4()), pytest.raises(TypeError, match=rf"input has dtype {dtype}; a linear layer takes floating"):
        module(x)


def test_a_wrong_last_dimension_names_the_layer() -> None:
    for shape in ((4, 31), (), (32, 4)):
        with autocast(NVFP4()), pytest.raises(ValueError, match=r"linear: input \(.*\) does not end in in_features=32"):
            layer()(torch.zeros(shape))


@each_recipe
def test_one_layer_may_run_twice_in_a_forward_pass(recipe: Recipe) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = layer(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.shared(x))

    module, x = Twice(), rand(8, 32)
    _, dx, dw, db = gradients(module, x, recipe)
    exact = gradients(module, x, FP32())
    for a, b in zip((dx, dw, db), exact[1:], strict=True):
        assert float((a - b).norm()) <= 0.5 * float(b.norm())
    assert same((dx, dw, db), gradients(module, x, recipe)[1:]), "and twice the same"


def test_tied_weights_are_prepared_for_each_layer_and_share_a_gradient() -> None:
    model = nn.Sequential(layer(32, 32), layer(32, 32))
    model[1].weight = model[0].weight
    f4.convert(model)
    assert model[0].weight is model[1].weight
    gradients(model, rand(8, 32), NVFP4())
    assert len(list(model.parameters())) == 3
    exact = copy.deepcopy(model)
    assert exact[0].weight is exact[1].weight


# -- what is cached, and for how long ---------------------------------------------------------------------------------


def test_with_a_step_weights_are_prepared_once_and_anew_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    real = PreparedWeights._prepare

    def prepare(self: PreparedWeights, w: Tensor, form: WeightForm, *others: object) -> object:
        prepared.append(form.operand == FPROP_W)
        return real(self, w, form, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(PreparedWeights, "_prepare", prepare)
    module = layer()
    for step in (0, 0, 1):
        gradients(module, rand(8, 32), NVFP4(), step=step)
    assert prepared == [True, True], "16×16 blocks serve both directions"
    gradients(module, rand(8, 32), NVFP4(two_d_weights=False), step=1)
    assert prepared[2:] == [True, False]


@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizers_step_reaches_the_next_forward(fused: bool) -> None:
    """A fused optimizer changes weights without incrementing torch's version counter: only the step shows it."""
    for steps in ((0, 1), (None, None)):
        module, x = layer(), rand(8, 32)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0) if not fused else None
        optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=1.0, fused=True)
        before = gradients(module, x, NVFP4(), step=steps[0])[0]
        optimizer.step()
        with autocast(NVFP4(), step=steps[1]):
            found = module(x)
        fresh = copy.deepcopy(module)
        with autocast(NVFP4(), step=steps[1]):
            assert torch.equal(found, fresh(x))
        assert not torch.equal(found, before)


def test_a_replaced_or_loaded_weight_is_noticed_within_a_step() -> None:
    module, other, x = layer(), layer(), rand(8, 32)
    with torch.no_grad():
        other.weight.mul_(-3)
    with autocast(NVFP4(), step=0):
        expected = other(x)
        module(x)
        module.load_state_dict(other.state_dict())
        assert torch.equal(module(x), expected)
        for factor in (1.0, 2.0, 3.0):  # the next weight may get the memory of a freed one
            module.weight = nn.Parameter(other.weight.detach() * factor)
            assert torch.equal(module(x), copy.deepcopy(module)(x))


def test_a_weight_that_is_gathered_again_within_a_step_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 frees a weight's memory after the layer and fills other memory with the same values before backward."""
    prepared: list[int] = []
    real = PreparedWeights._prepare
    monkeypatch.setattr(
        PreparedWeights,
        "_prepare",
        lambda *a: (prepared.append(1), real(*a))[1],  # type: ignore[func-returns-value]
    )
    module, x = layer(bias=False), rand(8, 32)
    values = module.weight.detach().clone()
    with autocast(NVFP4(), step=0):
        first = module(x)
        storage = module.weight.untyped_storage()
        storage.resize_(0)
        storage.resize_(values.nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(module.weight):
            module.weight.copy_(values)
        assert torch.equal(module(x), first)
    assert len(prepared) == 1


def test_what_was_prepared_is_dropped_with_the_weight() -> None:
    module = layer(bias=False)
    with autocast(NVFP4(), step=0):
        module(rand(8, 32))
    (_, form), *_ = module.prepared(None)._forms
    values = weakref.ref(form.values)
    del form
    module.weight = nn.Parameter(torch.zeros(48, 32))
    assert values() is None


def test_without_a_step_nothing_is_kept_and_bits_change_from_call_to_call() -> None:
    module, x = layer(bias=False), rand(32, 32)
    first, second = (gradients(module, x, NVFP4(), step=None)[1] for _ in range(2))
    assert not torch.equal(first, second), "stochastic rounding draws anew"
    assert torch.equal(*(gradients(module, x, NVFP4(stochastic_rounding=False), step=None)[1] for _ in range(2)))
    with torch.no_grad(), autocast(NVFP4()):
        module(x)
    assert module._calls == 4, "evaluation does not advance the count"


@pytest.mark.parametrize(
    ("recipe", "per_element"),
    [(NVFP4(), 0.6), (MXFP8(), 1.05), (FP8Current(), 1.05)],
    ids=lambda r: str(r)[:6],
)
def test_backward_keeps_packed_codes(recipe: Recipe, per_element: float) -> None:
    module, x = layer(64, 48), rand(128, 64).bfloat16().requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast(recipe, step=0):
        module(x)
    size = sum(t.untyped_storage().nbytes() for t in kept if t is not module.weight)
    assert size <= per_element * x.numel() + 4


def test_a_second_derivative_is_refused_instead_of_being_wrong() -> None:
    module, x = layer(), rand(4, 32).requires_grad_()
    with autocast(NVFP4(), step=0):
        y = module(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_backward_twice_through_a_kept_graph_gives_the_same() -> None:
    module, x = layer(), rand(8, 32).requires_grad_()
    with autocast(NVFP4()):
        y = module(x)
    found = [torch.autograd.grad(y.sum(), (x, module.weight), retain_graph=True) for _ in range(2)]
    assert same(*found)


# -- as a module ------------------------------------------------------------------------------------------------------


def test_the_state_dict_is_that_of_nn_linear() -> None:
    module, plain = layer(), nn.Linear(32, 48)
    with autocast(NVFP4(), step=0):
        module(rand(4, 32))
    assert list(module.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(module.state_dict())
    module.load_state_dict(plain.state_dict())


def test_copies_and_pickles_are_independent_and_leave_the_cache_behind() -> None:
    module, x = layer(), rand(8, 32)
    base = gradients(module, x, NVFP4())
    module.zero_grad()
    small = io.BytesIO()
    torch.save(nn.Linear(32, 48), small)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    assert buffer.tell() < small.tell() + 6000, "no prepared weights inside"
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (copy.deepcopy(module), loaded):
        assert same(gradients(other, x, NVFP4()), base)
        with torch.no_grad():
            other.weight.zero_()
        with autocast(NVFP4(), step=0):
            assert torch.equal(other(x), other.bias.bfloat16().float().expand(8, 48))
    assert same(gradients(module, x, NVFP4()), base)


def test_it_shows_its_backend() -> None:
    assert "backend=reference" in repr(layer(backend="reference"))
    with pytest.raises(ValueError, match="backend='cuda' is not one of auto, te, native, emulate, reference"):
        layer(backend="cuda")


def test_a_layer_on_the_meta_device_can_be_materialised() -> None:
    module = Linear(32, 48, device="meta")
    with autocast(NVFP4(), step=0):
        assert module(torch.empty(4, 32, device="meta")).shape == (4, 48)
    module.to_empty(device="cpu")
    module.load_state_dict(layer().state_dict())
    assert same(gradients(module, rand(8, 32), NVFP4()), gradients(layer(), rand(8, 32), NVFP4()))
    other = Linear(32, 48, device="meta")
    other.load_state_dict(layer().state_dict(), assign=True)
    assert same(gradients(other, rand(8, 32), NVFP4()), gradients(layer(), rand(8, 32), NVFP4()))


def test_fp16_gradients_overflow_to_infinity_and_do_not_wrap() -> None:
    module, x = layer(bias=False), rand(8, 32).half().requires_grad_()
    with autocast(FP16(), step=0):
        y = module(x)
    y.backward(torch.full_like(y, 6e4))
    assert module.weight.grad is not None
    assert module.weight.grad.isinf().any(), "what a loss scaler looks for"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_leaves_the_numbers_alone_in_every_context(backend: str) -> None:
    """A graph compiled outside a context must not be reused inside one, or vice versa."""
    torch._dynamo.reset()
    model = f4.convert(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
    compiled, x = torch.compile(model, backend=backend), rand(8, 16)

    def run(module: nn.Module, recipe: Recipe | None) -> tuple[Tensor, ...]:
        model.zero_grad()
        with autocast(recipe or BF16(), step=0, token_offset=0, enabled=recipe is not None):
            y = module(x)
        y.square().sum().backward()
        return (y.detach(), *(p.grad.clone() for p in model.parameters()))  # type: ignore[union-attr]

    for recipe in (None, NVFP4(), MXFP8(), None, NVFP4()):
        assert same(run(compiled, recipe), run(model, recipe))
    torch._dynamo.reset()


def test_backend_te_without_a_gpu_is_refused_with_what_would_run() -> None:
    module = layer(backend="te")
    with (
        autocast(NVFP4(), step=0),
        pytest.raises(ValueError, match=r"needs an NVIDIA GPU, not cpu\. backend=auto would run it by emulate"),
    ):
        module(rand(4, 32))
    with autocast(BF16(), step=0):
        assert module(rand(4, 32)).isfinite().all(), "what is not quantised is torch's"
