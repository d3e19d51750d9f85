"""StripedHyena 2: equal to its authors' software, first weights, documents, a cache, and what it
refuses.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from family_models import FamilyChecks, check_drawn, parameters
from golden import REDUCED
from safetensors import safe_open
from torch import Tensor

import fp4train as f4
from fp4train.models.families import family_for
from fp4train.models.hyena import FilterShape, Hyena, HyenaModel
from fp4train.optim import keep_bounds
from fp4train.optim.adamw import AdamW
from fp4train.parameters import largest_values
from fp4train.precision import FP32, autocast

FILTERS = FilterShape(short=5, medium=12, groups=8, poles=4)
SMALL: dict[str, Any] = {
    "width": 32,
    "pattern": "SDH*S",
    "heads": 2,
    "hidden": 48,
    "filters": FILTERS,
}
LONG = 40
Golden = tuple[dict[str, Tensor], dict[str, Any]]


def model(**changes: Any) -> HyenaModel:
    torch.manual_seed(0)
    converted = f4.convert(Hyena(**{**SMALL, **changes}).build(vocab_size=60, seq_len=LONG))
    assert isinstance(converted, HyenaModel)
    return converted.eval()


def tokens(batch: int = 3, time: int = LONG) -> Tensor:
    return torch.randint(0, 60, (batch, time), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def golden() -> Golden:
    """(Weights, gradients, tokens and logits of vortex by name; its configuration with our
    `model_type`).
    """
    with safe_open(REDUCED / "hyena.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, {
            "model_type": "stripedhyena2",
            **config,
        }


def test_logits_and_gradients_equal_those_of_vortex(golden: Golden) -> None:
    found, config = golden
    family = family_for(config)
    shape = family.shape_of(config)
    ours = shape.build(vocab_size=64, seq_len=256)
    names = family.names_of(shape)
    ours.load_state_dict({own: found[f"weight.{name}"] for own, name in names.items()})
    x = found["tokens"]
    expected = found["logits"]
    with torch.no_grad():
        assert (ours(x) - expected).abs().max() / expected.abs().max() < 1e-6
    ours(x[:, :-1], x[:, 1:]).backward()
    gradients = {
        name.removeprefix("gradient."): each
        for name, each in found.items()
        if name.startswith("gradient.")
    }
    assert {names[name] for name, _ in ours.named_parameters()} == gradients.keys()
    for name, parameter in ours.named_parameters():
        expected = gradients[names[name]]
        assert parameter.grad is not None
        assert (parameter.grad - expected).norm() / expected.norm() < 1e-5, name


def test_the_names_are_all_that_vortex_stores(golden: Golden) -> None:
    found, config = golden
    family = family_for(config)
    stored = {name.removeprefix("weight.") for name in found if name.startswith("weight.")}
    named = set(family.names_of(family.shape_of(config)).values())
    assert named < stored and all(family.computed(name) for name in stored - named)


def test_a_configuration_comes_back_as_it_was(golden: Golden) -> None:
    _, config = golden
    family = family_for(config)
    shape = family.shape_of(config)
    written = json.loads(json.dumps(family.config_of(shape, vocab_size=64, seq_len=100)))
    assert family.shape_of(written) == shape
    assert {key: value for key, value in written.items() if key in config} == {
        key: value for key, value in config.items() if key in written
    }
    assert config.keys() - written.keys() == {"inner_size_multiple_of"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hcs_layer_idxs": [0]},
            "block 4 is in none of hcs_layer_idxs, hcm_layer_idxs, hcl_layer_idxs, attn_layer_i",
        ),
        (
            {"hcs_layer_idxs": [0, 3, 4]},
            "attn_layer_idxs names block 3, which is also in hcs_layer_idxs",
        ),
        (
            {"hcs_layer_idxs": [0, 4, 5]},
            "hcs_layer_idxs names block 5, which is not below num_layers=5",
        ),
        ({"hcs_layer_idxs": "04"}, "hcs_layer_idxs='04' must be a list"),
        (
            {"hcs_filter_length": 128},
            "hcs_filter_length=128 is not supported: Evo 2's software has fewer than 128",
        ),
        (
            {"hcm_filter_length": 64},
            "hcm_filter_length=64 is not supported: Evo 2's software has at least 128 taps",
        ),
        ({"hcm_filter_groups": 8}, "hcs_filter_groups=4 and hcm_filter_groups=8 must be equal"),
        (
            {"hcl_filter_groups": 4},
            "hcl_filter_groups=4 is not supported: long filters are one per channel, 16",
        ),
        ({"mlp_activation": "silu"}, "mlp_activation='silu' is not supported: only 'gelu' is"),
        ({"column_split": False}, "column_split=False is not supported"),
        (
            {"use_interpolated_rotary_pos_emb": True},
            "use_interpolated_rotary_pos_emb=True is not supported",
        ),
        ({"rope_theta": 1e4}, "rope_theta=10000.0 is an unknown key of a stripedhyena2 model"),
    ],
)
def test_what_the_model_here_lacks_is_refused_by_key_and_value(
    golden: Golden, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        family_for(golden[1]).shape_of({**golden[1], **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"filters": replace(FILTERS, medium=64)},
            "model.filters.medium=64 is not supported: Evo 2's software has at",
        ),
        ({"filters": replace(FILTERS, short=200)}, "model.filters.short=200 is not supported"),
        ({"head_dim": 8}, "model.head_dim=8 has no form in Evo 2's software"),
    ],
)
def test_what_evo_2_lacks_has_no_form_there(changes: dict[str, Any], message: str) -> None:
    shape = Hyena(**{**SMALL, **changes})
    with pytest.raises(ValueError, match=message):
        family_for({"model_type": "stripedhyena2"}).config_of(shape, vocab_size=64, seq_len=64)


def test_evo2_1b_has_its_blocks_and_parameters() -> None:
    """ArcInstitute/evo2, evo2-1b-8k.yml; 1.1 billion parameters."""
    shape = Hyena(
        width=1920, pattern="SDH*SDHSDH*SDHSDH*SDHSDH*", heads=15, kv_heads=15, hidden=5120, vocab_size=512,
        filters=FilterShape(groups=128),
    )  # fmt: skip
    assert [place for place, kind in enumerate(shape.pattern) if kind == "*"] == [3, 10, 17, 24]
    assert parameters(shape, 512) == pytest.approx(1.108e9, rel=1e-3)


class TestTheHyena(FamilyChecks):
    model = staticmethod(model)
    tokens = staticmethod(tokens)


def test_first_weights_are_the_same_by_every_way_to_draw_them() -> None:
    built = model()
    poles = built.blocks[2].mixer.log_poles
    assert ((poles < -1 / 513) & (poles > -1 / 1.99)).all() and poles.unique().numel() > 100
    check_drawn(Hyena(**SMALL), built, LONG)


def test_filters_are_no_matrices_and_do_not_decay() -> None:
    built = model()
    assert f4.conversion(built).share == 1
    groups = AdamW(weight_decay=0.2).build(built).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    free = {
        name.rpartition(".")[2]
        for name, p in built.named_parameters()
        if decays[id(p)] == 0 and p.dim() > 1
    }
    assert free == {"featuriser", "taps", "log_poles", "residues"}


def test_no_step_makes_an_exponential_grow() -> None:
    built = model()
    optimizer = AdamW(lr=1.0).build(built)
    keep_bounds(optimizer, built, largest_values(built))
    poles = built.blocks[2].mixer.log_poles
    for _ in range(2):
        for parameter in built.parameters():
            parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
    assert poles.max() == poles.min() == torch.tensor(-1e-5)
    assert built.blocks[2].mixer.residues.min() > 1, "the others are free"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pattern": "SX"},
            r"model.pattern=SX: letter 2 is 'X'; known are S \(short convolution\), D "
            r"\(medium convolut",
        ),
        ({"pattern": ""}, "model.pattern has 0 blocks"),
        ({"hidden": 0}, "model.hidden=0 must be at least 1"),
        ({"kv_heads": 1}, "model.kv_heads=1 must be model.heads=2"),
        (
            {"heads": 32, "kv_heads": 32},
            "heads of 1 elements: rotary embedding needs an even number",
        ),
        ({"gelu": "some"}, "model.gelu='?some'? "),
        ({"rope_base": 0.0}, "model.rope_base=0.0 must be finite and above 0"),
        (
            {"filters": FilterShape(groups=5)},
            "model.width=32 is not divisible by model.filters.groups=5",
        ),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hyena(**{**SMALL, **changes})


@pytest.mark.parametrize("name", ["featuriser", "short", "medium", "groups", "poles"])
def test_filters_without_taps_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"model.filters.{name}=0 must be at least 1"):
        FilterShape(**{name: 0})


def test_gelu_is_on_the_gates_that_the_shape_names() -> None:
    """Without it the first block's MLP is a product of two linear maps: even in its input."""
    for gelu, places in (("first", [True, False]), ("all", [True, True])):
        blocks = model(gelu=gelu).blocks
        x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
        with autocast(FP32()):
            assert [
                not torch.allclose(block.mlp(x), block.mlp(-x)) for block in (blocks[0], blocks[1])
            ] == places
