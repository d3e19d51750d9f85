"""The linear layer with backend=te on a fake `transformer_engine.pytorch` that records what it is
asked for.

The fake keeps two habits of TE's: a module's state is built when it first runs, under the recipe of
that moment, and delayed scaling has scale and amax_history tensors in `fp8_meta`. What TE's real
Python does is test_te_real.py's part.
"""

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fp4train.backends.te.executor as te_backend
from fp4train.backends.te import TransformerEngine, availability, region
from fp4train.nn import convert as convert_layers
from fp4train.precision import LayerPolicy, autocast
from fp4train.precision.recipes import BF16, MXFP8, NVFP4, FP8Block, FP8Current, FP8Delayed

if availability.version() is None:
    pytest.skip("the transformer_engine wheel is not installed", allow_module_level=True)


class FakeTE(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("transformer_engine.pytorch")
        self.stack: list[Any] = []
        self.built: list[Any] = []
        self.calls: list[tuple[str, Any, tuple[int, ...], torch.dtype]] = []
        state = types.SimpleNamespace(autocast_depth=0, is_first_fp8_module=False)
        manager = types.SimpleNamespace(
            quantization_state=state,
            get_fp8_group=lambda: None,
            reduce_and_update_fp8_tensors=lambda *, forward: None,
        )
        self.quantization = types.SimpleNamespace(FP8GlobalStateManager=manager)
        fake = self

        class Linear(nn.Module):
            def __init__(
                self,
                in_features: int,
                out_features: int,
                *,
                bias: bool,
                params_dtype: torch.dtype,
                device: str,
                name: str,
            ) -> None:
                super().__init__()
                assert device == "meta", "a module for each recipe must not cost memory"
                self.name = name
                self.fp8_meta = {}
                self.recipe = None
                self._fp8_workspaces = {}
                options = {"device": device, "dtype": params_dtype}
                self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
                self.bias = nn.Parameter(torch.empty(out_features, **options))
                fake.built.append(self)

            def init_fp8_meta_tensors(self, recipe: Any) -> None:
                if type(recipe).__name__ != "DelayedScaling" or "scaling_fwd" in self.fp8_meta:
                    return
                for direction, tensors in (("fwd", 3), ("bwd", 2)):
                    self.fp8_meta[f"scaling_{direction}"] = types.SimpleNamespace(
                        scale=torch.ones(tensors),
                        amax_history=torch.zeros(recipe.amax_history_len, tensors),
                    )

            def forward(self, x: torch.Tensor, *, is_first_microbatch: bool | None) -> torch.Tensor:
                recipe = fake.stack[-1]
                self.recipe = self.recipe or recipe  # built once, as TE's quantisers are
                self.init_fp8_meta_tensors(recipe)
                fake.calls.append((self.name, self.recipe, tuple(x.shape), x.dtype))
                return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

        self.Linear = Linear

    @contextmanager
    def autocast(self, *, enabled: bool, recipe: Any, amax_reduction_group: Any) -> Iterator[None]:
        assert enabled and amax_reduction_group is None
        self.stack.append(recipe)
        self.quantization.FP8GlobalStateManager.quantization_state.autocast_depth += 1
        try:
            yield
        finally:
            self.quantization.FP8GlobalStateManager.quantization_state.autocast_depth -= 1
            self.stack.pop()


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> FakeTE:
    fake = FakeTE()
    monkeypatch.setattr(te_backend, "pytorch_module", lambda: fake)
    monkeypatch.setattr(TransformerEngine, "why_not", lambda self, table, layer, device: None)
    return fake


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=True, dtype=dtype) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def convert(model: Model) -> Model:
    convert_layers(model, backend="te")
    return model


X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_layers_of_one_model_run_different_recipes(te: FakeTE) -> None:
    with autocast(NVFP4(), policy=LayerPolicy(first=1, last=0, recipe_for_kept=MXFP8())):
        convert(Model())(X)
    called = [type(recipe).__name__ for _, recipe, *_ in te.calls]
    assert called == ["MXFP8BlockScaling", "NVFP4BlockScaling", "NVFP4BlockScaling"]
    assert te.calls[0][0] == "blocks.0"
    assert te.stack == []


def test_kept_layers_and_plain_calls_run_torchs_linear(te: FakeTE) -> None:
    model = convert(Model())
    plain = model(X)
    for recipe, policy in ((NVFP4(), LayerPolicy(last=3)), (BF16(), None)):
        with autocast(recipe, policy=policy):
            assert torch.equal(model(X), plain)
    assert te.calls == []


def test_a_changed_option_gets_quantisers_of_its_own_and_the_way_back_the_first_ones(
    te: FakeTE,
) -> None:
    layer = convert(Model()).blocks[0]
    for recipe in (NVFP4(), NVFP4(hadamard=False), NVFP4()):
        with autocast(recipe):
            layer(X)
    assert [recipe.disable_rht for _, recipe, *_ in te.calls] == [False, True, False]
    assert te.calls[0][1] is te.calls[2][1]
    assert len(te.built) == 2


def test_parameters_are_those_of_nn_linear_and_a_replaced_one_runs(te: FakeTE) -> None:
    """FSDP2 replaces a parameter when it gathers the shards of a layer."""
    model = Model()
    names = list(model.state_dict())
    weight = model.blocks[0].weight
    layer = convert(model).blocks[0]
    assert layer.weight is weight
    for recipe in (NVFP4(), MXFP8()):
        layer.zero_grad()
        with autocast(recipe):
            layer(X).float().sum().backward()
        assert layer.weight.grad is not None and layer.bias.grad is not None
    assert list(model.state_dict()) == names
    layer.weight = nn.Parameter(torch.zeros_like(weight))
    with autocast(NVFP4()):
        assert torch.equal(layer(X), layer.bias.expand(2, 16, 32))


@pytest.mark.parametrize(
    ("recipe", "tokens"), [(NVFP4(), 32), (FP8Current(), 32), (FP8Block(), 128)]
)
def test_tokens_are_padded_and_cut_back(te: FakeTE, recipe: Any, tokens: int) -> None:
    layer = convert(Model()).blocks[0]
    with autocast(recipe):
        y = layer(X[:, :15])
        assert layer(X[:0]).shape == (0, 16, 32)
        assert layer(X[0, 0]).shape == (32,)
    assert te.calls[0][2] == (tokens, 32)
    exact = nn.functional.linear(X[:, :15].reshape(-1, 32), layer.weight, layer.bias)
    assert torch.equal(y.flatten(0, 1), exact)


def test_float32_parameters_run_in_the_recipes_dtype_and_keep_the_inputs(te: FakeTE) -> None:
    layer = convert(Model(torch.float32)).blocks[0]
    with autocast(NVFP4()):
        assert layer(X.float()).dtype == torch.float32
    assert te.calls[0][3] == torch.bfloat16


def test_delayed_scaling_outside_of_a_region_is_refused(te: FakeTE) -> None:
    with autocast(FP8Delayed()), pytest.raises(RuntimeError, match=r"region\(recipe.table\(\)\)"):
        convert(Model())(X)


def test_a_region_is_one_outer_autocast_of_delayed_scaling(te: FakeTE) -> None:
    """Its scales are updated when the region ends."""
    recipe = FP8Delayed(history=4)
    with region(MXFP8().table(), recipe.table()), autocast(recipe):
        convert(Model())(X)
        assert [type(recipe).__name__ for recipe in te.stack] == ["DelayedScaling"]


def delayed_layer(recipe: FP8Delayed, state: Any = None) -> Any:
    model = convert(Model())
    if state is not None:
        model.blocks[0].load_scaling_state(state)
    with region(recipe.table()), autocast(recipe):
        model(X)
    return model.blocks[0]


@pytest.mark.parametrize("length", [4, 2])
def test_delayed_scalings_history_is_saved_and_restored_to_its_newest_entries(
    te: FakeTE, length: int
) -> None:
    layer = delayed_layer(FP8Delayed(history=4))
    te.built[0].fp8_meta["scaling_fwd"].amax_history.copy_(torch.arange(4.0)[:, None].expand(4, 3))
    te.built[0].fp8_meta["scaling_bwd"].scale.fill_(5)
    state = layer.scaling_state()
    fresh = convert(Model()).blocks[0]
    fresh.load_scaling_state(state)
    assert set(fresh.scaling_state()) == set(state), (
        "a checkpoint written before the first step loses nothing"
    )
    resumed = delayed_layer(FP8Delayed(history=length), state).states["te"].state()
    newest = [0.0, 1.0, 2.0, 3.0] if length == 4 else [0.0, 3.0]
    assert resumed["amax_history_fwd"][:, 0].tolist() == newest
    assert resumed["scale_bwd"].tolist() == [5.0, 5.0]


def test_a_copy_rebuilds_its_own_modules_and_takes_the_history_along(te: FakeTE) -> None:
    layer = delayed_layer(FP8Delayed(history=4))
    te.built[0].fp8_meta["scaling_fwd"].scale.fill_(7)
    other = copy.deepcopy(layer)
    assert other.weight is not layer.weight
    assert other.states["te"].state()["scale_fwd"].tolist() == [7, 7, 7]
