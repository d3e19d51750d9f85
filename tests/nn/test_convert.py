"""convert: any torch model, parameters shared, names kept."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fp4train as f4
from fp4train.nn import Linear
from fp4train.precision import MXFP8, NVFP4, FP8Delayed, LayerPolicy, autocast


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x)
        k = self.key(x)
        v = self.value(x)
        y: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return y


class LayerOfUser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


class UsersModel(nn.Module):
    """Structured as in transformers: a backbone, a head tied to the embedding, `layers` in a
    ModuleList.
    """

    def __init__(self, width: int = 32, vocabulary: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(vocabulary, width),
                "layers": nn.ModuleList(LayerOfUser(width) for _ in range(3)),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        y: torch.Tensor = self.lm_head(x)
        return y


TOKENS = torch.arange(32).reshape(2, 16)


def test_a_users_model_trains_with_its_own_optimizer_and_tied_weights() -> None:
    model = UsersModel()
    names = [n for n, _ in model.named_parameters()]
    keys = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert f4.convert(model) is model
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert model.lm_head.weight is model.model["embed_tokens"].weight
    losses = []
    for step in range(12):
        with autocast(NVFP4(), policy=LayerPolicy(last=1), step=step):
            loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0], "an optimizer made before the conversion moves the layers"


def test_outside_of_autocast_nothing_changes() -> None:
    plain = UsersModel()
    converted = f4.convert(UsersModel())
    assert torch.equal(plain(TOKENS), converted(TOKENS))
    plain.load_state_dict(converted.state_dict())


def test_layers_know_their_names_and_places() -> None:
    model = f4.convert(UsersModel(), backend="emulate")
    layer = model.model["layers"][2].mlp[0].layer
    assert (layer.name, layer.block, layer.blocks) == ("model.layers.2.mlp.0", 2, 3)
    assert model.lm_head.layer.block is None
    assert all(m.backend == "emulate" for m in model.modules() if isinstance(m, Linear))
    assert len({m._layer_key for m in model.modules() if isinstance(m, Linear)}) == 19, (
        "each draws its own bits"
    )


def test_converting_twice_keeps_modules_and_what_they_learnt() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(16, 16)))
    with autocast(FP8Delayed(history=2)):
        model(torch.ones(2, 16))
    state = model[0].scaling_state()
    first = model[0]
    wrapped = f4.convert(nn.ModuleList([model]), backend="reference")
    assert wrapped[0][0] is first
    assert (first.layer.name, first.backend) == ("0.0", "reference")
    assert first.scaling_state().keys() == state.keys() != set()


def test_a_module_in_several_places_is_replaced_in_all_of_them() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = self.a
            self.blocks = nn.ModuleList([nn.Sequential(self.a)] * 2)

    model = f4.convert(Shared())
    assert isinstance(model.a, Linear)
    assert model.a is model.b is model.blocks[0][0] is model.blocks[1][0]


def test_a_single_layer_is_returned_converted() -> None:
    linear = nn.Linear(16, 8)
    found = f4.convert(linear)
    assert isinstance(found, Linear)
    assert found.weight is linear.weight


def test_hooks_training_flag_and_what_else_was_set_stay() -> None:
    linear = nn.Linear(16, 16)
    calls: list[str] = []
    linear.register_forward_hook(lambda *_: calls.append("forward"))
    linear._is_hf_initialized = True  # type: ignore[assignment]
    linear.weight.requires_grad_(False)
    model = f4.convert(nn.Sequential(linear).eval())
    model(torch.zeros(1, 16))
    assert calls == ["forward"]
    assert model[0]._is_hf_initialized
    assert not model[0].training
    assert not model[0].weight.requires_grad


def test_a_subclass_with_a_forward_of_its_own_is_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Doubling(16, 16), nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
    f4.convert(model)
    assert type(model[0]) is Doubling
    assert isinstance(model[1], Linear)
    assert not isinstance(model[2].out_proj, Linear), (
        "attention multiplies its weight without calling it"
    )
    with autocast(NVFP4()):
        model[0](torch.ones(1, 16))


class Tagged(nn.Linear):
    """A user's layer that adds an attribute, a method and its own initialisation, but computes what
    nn.Linear does.
    """

    def __init__(self, in_features: int, out_features: int, tag: str) -> None:
        super().__init__(in_features, out_features)
        self.tag = tag

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)

    def shout(self) -> str:
        return self.tag.upper()


def test_a_subclass_that_computes_the_same_is_converted_and_stays_of_its_class() -> None:
    plain = nn.Sequential(Tagged(32, 32, "a"), nn.Linear(32, 32))
    weight = plain[0].weight
    keys = list(plain.state_dict())
    model = f4.convert(plain)
    assert isinstance(model[0], Tagged) and isinstance(model[0], Linear)
    assert type(model[0]).__name__ == "Tagged"
    assert model[0].weight is weight
    assert model[0].shout() == "A"
    assert list(model.state_dict()) == keys
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model[0](x), nn.functional.linear(x, weight, model[0].bias)), (
        "outside of autocast"
    )
    with autocast(NVFP4(), step=0):
        quantised = model[0](x)
    assert not torch.equal(quantised, x), "the identity, but for the rounding of its input"
    assert f4.convert(model)[0] is model[0], "converting again keeps it"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch.save"]
)
def test_a_converted_subclass_is_copied_and_pickled(
    copied: Callable[[nn.Module], nn.Module] | str,
) -> None:
    model = f4.convert(nn.Sequential(Tagged(32, 32, "a")))
    if copied == "torch.save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        assert callable(copied)
        other = copied(model)
    assert type(other[0]) is type(model[0])
    assert (other[0].tag, other[0].layer) == ("a", model[0].layer)
    assert other[0].weight is not model[0].weight
    x = torch.ones(2, 32)
    with autocast(NVFP4(), step=0):
        assert torch.equal(other(x), model(x))


def test_a_subclass_that_uses_fp4trains_names_is_refused() -> None:
    class Placed(nn.Linear):
        layer = 3

    with pytest.raises(
        TypeError,
        match=r"1 \(Placed\) has layer, which fp4train's layer needs for itself: rename it",
    ):
        f4.convert(nn.Sequential(nn.Linear(16, 16), Placed(16, 16)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_layer_of_torch_uses_its_converted_layers_in_eval_mode() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 8, 32)
    padding = torch.arange(8).expand(2, 8) >= torch.tensor([[8], [5]])
    with torch.no_grad():
        plain = model(x)
        masked = model(x, src_key_padding_mask=padding)
        f4.convert(model)
        torch.testing.assert_close(model(x), plain)
        torch.testing.assert_close(
            model(x, src_key_padding_mask=padding)[~padding], masked[~padding]
        )
        with autocast(NVFP4(), policy=LayerPolicy(last=0), step=0):
            low = model(x)
            low_masked = model(x, src_key_padding_mask=padding)
    assert float((low - plain).norm() / plain.norm()) > 0.01, "the layers are called, and quantise"
    assert not torch.allclose(low_masked[~padding], masked[~padding], rtol=1e-3)


def test_a_lazy_layer_is_refused_until_it_knows_its_shape() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(16))
    with pytest.raises(ValueError, match="1 is a LazyLinear without weights yet: run one batch"):
        f4.convert(model)
    assert type(model[0]) is nn.Linear, "nothing is half converted"
    model(torch.ones(1, 16))
    assert all(isinstance(layer, Linear) for layer in f4.convert(model))


def test_a_model_without_linear_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no nn\.Linear"):
        f4.convert(nn.Sequential(nn.ReLU()))


def test_a_model_whose_linear_layers_are_all_left_alone_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"no nn\.Linear that can be converted \(0\.out_proj: nn\.MultiheadA"
    ):
        f4.convert(nn.Sequential(nn.MultiheadAttention(16, 2)))


@pytest.mark.parametrize("model", [None, "model", UsersModel])
def test_what_is_no_module_is_refused_by_type(model: object) -> None:
    with pytest.raises(
        TypeError,
        match=r"convert takes a model \(torch\.nn\.Module\) and changes it in place, not ",
    ):
        f4.convert(model)  # type: ignore[arg-type]


def test_a_model_on_the_meta_device_is_converted_without_memory() -> None:
    with torch.device("meta"):
        model = f4.convert(UsersModel(width=64))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(UsersModel(width=64).state_dict())
    with autocast(MXFP8()):
        assert model(TOKENS).isfinite().all()


def test_conversion_draws_no_random_numbers() -> None:
    model = UsersModel()
    state = torch.get_rng_state()
    f4.convert(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_torch_export_outside_of_autocast_gives_plain_matrix_products_and_inside_says_so() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(64, 64, bias=False)))
    x = torch.randn(32, 64)
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))
    with (
        autocast(NVFP4()),
        pytest.raises(TypeError, match=r"call torch.export outside of fp4train.autocast"),
    ):
        torch.export.export(model, (x,))
