"""convert: anyone's model, its parameters shared, its names kept."""

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
        q, k, v = self.query(x), self.key(x), self.value(x)
        y: torch.Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return y


class LayerOfUser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        y: torch.Tensor = x + self.mlp(self.norm(x))
        return y


class UsersModel(nn.Module):
    """In the manner of transformers: a backbone, a head tied to the embedding, `layers` in a ModuleList."""

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
    names, keys = [n for n, _ in model.named_parameters()], list(model.state_dict())
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
    plain, converted = UsersModel(), f4.convert(UsersModel())
    assert torch.equal(plain(TOKENS), converted(TOKENS))
    plain.load_state_dict(converted.state_dict())


def test_layers_know_their_names_and_places() -> None:
    model = f4.convert(UsersModel(), backend="emulate")
    layer = model.model["layers"][2].mlp[0].layer
    assert (layer.name, layer.block, layer.blocks) == ("model.layers.2.mlp.0", 2, 3)
    assert model.lm_head.layer.block is None
    assert all(m.backend == "emulate" for m in model.modules() if isinstance(m, Linear))
    assert len({m._layer_key for m in model.modules() if isinstance(m, Linear)}) == 19, "each draws its own bits"


def test_converting_twice_keeps_modules_and_what_they_learnt() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(16, 16)))
    with autocast(FP8Delayed(history=2)):
        model(torch.ones(2, 16))
    state, first = model[0].scaling_state(), model[0]
    wrapped = f4.convert(nn.ModuleList([model]), backend="reference")
    assert wrapped[0][0] is first
    assert (first.layer.name, first.backend, first.kernels["te"].name) == ("0.0", "reference", "0.0")
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


def test_subclasses_are_left_alone_because_their_forward_may_differ() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Doubling(16, 16), nn.Linear(16, 16), nn.MultiheadAttention(16, 2))
    f4.convert(model)
    assert type(model[0]) is Doubling
    assert isinstance(model[1], Linear)
    assert not isinstance(model[2].out_proj, Linear)
    with autocast(NVFP4()):
        model[0](torch.ones(1, 16))


def test_a_model_without_linear_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Sequential holds no nn\.Linear"):
        f4.convert(nn.Sequential(nn.ReLU()))


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
