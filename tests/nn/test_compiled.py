"""torch.compile around fp4train's layers: whole graphs, the bits of eager mode, no stale graph is reused."""

from __future__ import annotations

import copy
import gc
import io
import shutil
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fp4train as f4
from fp4train.models.llama import Llama
from fp4train.precision import (
    BF16,
    FP16,
    MXFP8,
    NVFP4,
    FP8Delayed,
    LayerPolicy,
    OutlierChannels,
    Recipe,
    autocast,
    compile_context,
)
from fp4train.precision.context import activation_dtype, current
from fp4train.quantize import Quantized

pytestmark = [
    # Layers are part of graphs; test_uncompiled_layers.py has what holds on a torch where they are not.
    pytest.mark.skipif(compile_context.UNAVAILABLE is not None, reason=str(compile_context.UNAVAILABLE)),
    # All are the compiler's own.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning"),
]

POLICY = LayerPolicy(last=1)
needs_inductor = pytest.mark.skipif(  # tests/house/test_skips.py fails where that must not be
    shutil.which("g++") is None, reason="inductor needs a C++ compiler, which no package brings"
)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs compiled so far, in pieces or whole."""
    return int(counters["stats"]["unique_graphs"])


def llama(*, recompute: bool = False) -> nn.Module:
    shape = Llama(layers=3, width=32, heads=2, kv_heads=1, recompute=recompute)
    return f4.convert(shape.build(vocab_size=64, seq_len=16))


def step(
    module: nn.Module,
    model: nn.Module,
    recipe: Recipe | None,
    *inputs: Tensor,
    at: int | None = 0,
    policy: LayerPolicy | None = None,
) -> tuple[Tensor, ...]:
    """Output and gradients of one step; `recipe` None: outside of autocast."""
    model.zero_grad()
    with autocast(recipe or BF16(), step=at, token_offset=0, seed=5, policy=policy, enabled=recipe is not None):
        y = module(*inputs)
    y.square().sum().backward()
    return (y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None))


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tokens(rows: int = 2) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 64, (rows, 17))
    return drawn[:, :-1], drawn[:, 1:]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_a_whole_model_is_one_graph_with_the_bits_of_eager_mode_in_every_recipe(backend: str) -> None:
    model, data = llama(), tokens()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    recipes = (None, NVFP4(), MXFP8(), BF16(), NVFP4().with_high_precision("wgrad"), None)
    for at, recipe in enumerate(recipes):
        policy = None if recipe is None else POLICY
        ours = step(compiled, model, recipe, *data, at=at, policy=policy)
        assert same(ours, step(model, model, recipe, *data, at=at, policy=policy)), recipe


def test_a_change_of_recipe_step_or_seed_compiles_nothing_as_long_as_the_routes_stay() -> None:
    model, data = llama(), tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    step(compiled, model, NVFP4(), *data, policy=POLICY)
    assert graphs() == 1
    for at, recipe in enumerate((NVFP4(), MXFP8(), NVFP4(stochastic_rounding=False)), start=1):
        step(compiled, model, recipe, *data, at=at, policy=POLICY)
    assert graphs() == 1
    step(compiled, model, BF16(), *data, policy=POLICY)
    assert graphs() == 2, "layers that quantise nothing are torch's own again, for the compiler to fuse"


def test_blocks_that_are_alike_share_a_graph() -> None:
    model, data = llama(), tokens()
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="eager")
    for at in range(2):
        step(model, model, NVFP4(), *data, at=at, policy=POLICY)
    assert graphs() == 2, "one for quantised blocks, one for the block that the policy keeps"


def test_recomputed_regions_are_graphs_of_their_own_with_the_same_bits() -> None:
    model, data = llama(recompute=True), tokens()
    eager = step(model, model, NVFP4(), *data, policy=POLICY)
    assert same(step(torch.compile(model, backend="aot_eager"), model, NVFP4(), *data, policy=POLICY), eager)
    assert graphs() > 0


def pair(*, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32, bias=bias), nn.ReLU(), nn.Linear(32, 16, bias=bias))


class Checkpointed(nn.Module):
    """torch's own recomputation, which the compiler includes in the graph."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch_checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[assignment]
        return x


@pytest.mark.parametrize("recipe", [NVFP4(), FP8Delayed()], ids=lambda r: r.name)
def test_recomputation_inside_of_a_graph_finds_the_call_that_it_repeats(recipe: Recipe) -> None:
    """The context has ended when the graph's backward runs; without a step each call draws its own random bits, and a
    delayed amax must enter its history once."""
    states = []
    for through in (lambda model: model, lambda model: torch.compile(Checkpointed(model), backend="aot_eager")):
        torch.manual_seed(0)
        model = f4.convert(pair())
        results = [step(through(model), model, recipe, torch.ones(16, 16), at=None) for _ in range(2)]
        states.append((results, [m.scaling_state() for m in model if isinstance(m, f4.nn.Linear)]))
    (eager, eager_state), (compiled, compiled_state) = states
    assert all(same(a, b) for a, b in zip(eager, compiled, strict=True))
    for a, b in zip(eager_state, compiled_state, strict=True):
        assert same(tuple(a.values()), tuple(b.values()))


def test_a_layer_recomputed_by_a_graph_that_called_it_twice_is_refused() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(16, 16)))
    compiled = torch.compile(Checkpointed(model, times=2), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"0 was called 2 times in the forward pass that a graph recomputes"):
        step(compiled, model, NVFP4(), torch.ones(8, 16))


@pytest.mark.parametrize("recipe", [FP8Delayed(), NVFP4()], ids=lambda r: r.name)
def test_calls_without_a_step_count_as_in_eager_mode(recipe: Recipe) -> None:
    """Delayed amaxes enter the history once per call, and stochastic bits differ between calls."""
    x = torch.randn(24, 16)
    results = []
    for compile_it in (False, True):
        torch.manual_seed(1)
        model = f4.convert(pair(bias=False))
        module = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
        found = [step(module, model, recipe, x * scale, at=None) for scale in (1.0, 3.0, 0.5)]
        with torch.no_grad(), autocast(recipe):
            found.append((module(x),))
        results.append(found)
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_autocast_entered_inside_of_the_compiled_function_breaks_the_graph_and_not_the_numbers() -> None:
    model, x = f4.convert(pair()), torch.randn(8, 16)

    def inside(x: Tensor) -> Tensor:
        with autocast(NVFP4(), step=3, token_offset=0, seed=5):
            return model(x)

    expected = step(model, model, NVFP4(), x, at=3)
    model.zero_grad()
    y = torch.compile(inside, backend="aot_eager")(x)
    y.square().sum().backward()
    assert same((y.detach(), *(p.grad for p in model.parameters())), expected)  # type: ignore[misc]


def test_torchs_autocast_decides_the_output_dtype_as_in_eager_mode() -> None:
    model, x = f4.convert(pair()), torch.randn(8, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def run(module: nn.Module) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(module, model, NVFP4(), x)

    expected = run(model)
    assert expected[0].dtype == torch.bfloat16
    assert same(run(compiled), expected)


def test_other_batch_sizes_and_frozen_parameters_keep_their_bits() -> None:
    model = f4.convert(pair())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (8, 5, 40, 1):
        x = torch.randn(rows, 16, requires_grad=True)
        assert same(step(compiled, model, NVFP4(), x), step(model, model, NVFP4(), x)), rows
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    assert same(step(compiled, model, NVFP4(), x), step(model, model, NVFP4(), x))


class Sine(nn.Module):
    """Its backward needs its input, not its output, so the compiler may reuse the memory of the output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.long
@needs_inductor
def test_inductors_reuse_of_buffers_changes_nothing_that_a_layer_saved() -> None:
    """The compiler overwrites tensors that were passed to layers; wgrad in BF16 needs the old values."""
    model = f4.convert(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), Sine()) for _ in range(4))))
    recipe, x = NVFP4().with_high_precision("wgrad"), torch.randn(64, 32)
    compiled = torch.compile(model, fullgraph=True)
    for ours, expected in zip(step(compiled, model, recipe, x), step(model, model, recipe, x), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


class Gated(nn.Module):
    """No x fits the memory of the previous y, so it reuses the memory of the x before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            value, gate = layer(x).chunk(2, -1)
            x = value * gate.sin()
        return x


class Reweighted(nn.Module):
    """One layer whose weight the graph computes: different values at the same address each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        self.start = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        w = self.start.sin()
        for _ in range(3):
            x = torch.func.functional_call(self.layer, {"weight": w}, (x,))
            w = (w * x.mean(0)).sin()
        return x


@pytest.mark.long
@needs_inductor
@pytest.mark.parametrize("kind", [Gated, Reweighted])
@torch.no_grad()
def test_nothing_is_remembered_of_a_tensor_that_the_compiler_may_write_into(kind: type[nn.Module]) -> None:
    """Shared inputs and prepared weights are not reused by address and version, which the compiler does not change."""
    model = f4.convert(kind())
    x = torch.randn(64, 32 if kind is Gated else 64)
    compiled = torch.compile(model, fullgraph=True)
    with autocast(NVFP4(), step=1):
        expected = model(x)
        ours = compiled(x)
    assert float((ours - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("recipe", [NVFP4(), FP8Delayed()], ids=lambda r: r.name)
def test_compiled_blocks_inside_of_recomputed_regions_draw_what_the_first_pass_drew(recipe: Recipe) -> None:
    """Without a step each call draws its own bits and enters its amax: recomputing must repeat the call."""
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = llama(recompute=True)
        if compile_it:
            for block in model.blocks:  # type: ignore[union-attr]
                block.compile(backend="aot_eager")
        torch.manual_seed(1)
        found = [step(model, model, recipe, *tokens(), at=None, policy=POLICY) for _ in range(2)]
        scaling = [m.scaling_state() for m in model.modules() if isinstance(m, f4.nn.Linear)]
        results.append((found, scaling))
    (eager, eager_scaling), (compiled, compiled_scaling) = results
    assert all(same(a, b) for a, b in zip(eager, compiled, strict=True))
    assert all(same((*a.values(),), (*b.values(),)) for a, b in zip(eager_scaling, compiled_scaling, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_without_the_context_is_refused_as_in_eager_mode(reentrant: bool) -> None:
    model = f4.convert(pair())
    compiled, x = torch.compile(model, backend="eager"), torch.randn(8, 16, requires_grad=True)
    with autocast(NVFP4(), step=0):
        y = torch_checkpoint(compiled, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="is recomputed in backward without the autocast context"):
        y.sum().backward()  # type: ignore[union-attr]


def test_codes_are_freed_by_backward_and_contexts_with_their_calls() -> None:
    model, x = f4.convert(pair()), torch.randn(64, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with autocast(NVFP4()), torch.no_grad():
        compiled(x)
    step(compiled, model, NVFP4(), x)  # both graphs exist now and refer to the contexts they were traced in
    gc.collect()
    gc.disable()
    before = len(codes_alive())  # those that other tests hold
    try:
        with autocast(NVFP4(), step=None):
            seen = weakref.ref(current())  # type: ignore[arg-type]
            loss = compiled(x).sum()
            with torch.no_grad():
                compiled(x)
        assert len(codes_alive()) == before + 2
        loss.backward()
        assert len(codes_alive()) == before, "although the loss, and with it the graph, is still there"
        del loss
        assert seen() is None
    finally:
        gc.enable()


def codes_alive() -> list[Quantized]:
    return [each for each in gc.get_objects() if type(each) is Quantized]


def test_backward_twice_through_a_retained_graph_gives_the_same_twice() -> None:
    model, x = f4.convert(pair()), torch.randn(8, 16)
    with autocast(NVFP4(), step=0):
        loss = torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    loss.backward()
    assert same(tuple(once), tuple(p.grad for p in model.parameters()))  # type: ignore[misc]


def test_one_context_serves_several_forward_and_backward_passes_of_a_recomputing_graph() -> None:
    model = f4.convert(pair())
    compiled, x = torch.compile(Checkpointed(model), backend="aot_eager"), torch.ones(8, 16)
    with autocast(NVFP4(), step=0):
        for _ in range(2):
            with torch.no_grad():
                compiled(x)
            compiled(x).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torchs_autocast_does_not_reach_into_the_gemms(backend: str) -> None:
    model, x = f4.convert(pair()), torch.randn(8, 16)
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def run(module: nn.Module) -> tuple[Tensor, ...]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16), autocast(NVFP4(), step=0, token_offset=0):
            y = module(x)
            y.float().square().sum().backward()  # inside the context, which is wrong usage
        return (y.detach(), *(p.grad.clone() for p in model.parameters()))  # type: ignore[union-attr]

    assert same(run(compiled), run(model))


def test_a_function_that_only_asks_for_the_activation_dtype_gets_the_current_one() -> None:
    compiled = torch.compile(lambda x: x.to(activation_dtype(torch.float32)) + 1, backend="eager", fullgraph=True)
    for recipe in (None, BF16(), FP16(), BF16(), None):
        with autocast(recipe or BF16(), enabled=recipe is not None):
            assert compiled(torch.ones(3)).dtype == (torch.float32 if recipe is None else recipe.torch_dtype)


def test_a_policy_that_matches_nothing_says_so_in_compiled_code_too() -> None:
    compiled = torch.compile(f4.convert(pair()), backend="eager")
    with (
        pytest.raises(ValueError, match="matches no"),
        autocast(NVFP4(), policy=LayerPolicy(last=0, keep=("nowhere",))),
    ):
        compiled(torch.randn(8, 16))


@pytest.mark.long
@needs_inductor
def test_the_compilers_cache_keys_hold_no_weights() -> None:
    """A parametrized layer refuses to be pickled; a large one would take gigabytes."""
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    f4.convert(model)
    torch.nn.utils.parametrizations.weight_norm(model[1])
    with autocast(NVFP4(), step=0):
        torch.compile(model, fullgraph=True)(torch.randn(8, 16)).sum().backward()
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0


def test_copies_and_pickles_of_a_layer_have_handles_of_their_own() -> None:
    model = f4.convert(pair())
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    parametrized = copy.deepcopy(torch.nn.utils.parametrizations.weight_norm(copy.deepcopy(model)[0]))
    for layer in (
        copy.copy(model[0]),
        copy.deepcopy(model)[0],
        torch.load(stored, weights_only=False)[0],
        parametrized,
    ):
        assert layer.handle.layer is layer


def test_a_layer_and_its_weight_are_freed_at_once() -> None:
    layer = f4.convert(nn.Linear(16, 16))
    weight = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()


def test_settings_changed_after_compiling_are_seen() -> None:
    model, x = f4.convert(pair()), torch.randn(32, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    step(compiled, model, NVFP4(), x)
    f4.convert(model, backend="reference")
    assert same(step(compiled, model, NVFP4(), x), step(model, model, NVFP4(), x))


def test_layers_that_record_or_split_outlier_channels_run_outside_with_the_same_bits() -> None:
    recipe = NVFP4(outliers=OutlierChannels(recipe=MXFP8(), start=1, steps=1))
    eager = f4.convert(nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)))
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager")
    for at in range(4):
        x, found = torch.randn(64, 96, generator=torch.Generator().manual_seed(at)), []
        for module, model in ((eager, eager), (compiled, other)):
            model.zero_grad()
            with autocast(recipe, step=at):
                y = module(x)
            y.sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), at
        layers = [m for model in (eager, other) for m in model if isinstance(m, f4.nn.Linear)]
        assert [m.channels is not None for m in layers] == [at >= 2] * 4, at
