"""The policy: which layers of a real model keep high precision, by counts of blocks and by name
patterns.
"""

import pytest
import torch
from torch import nn

from fp4train.hardware import Device
from fp4train.nn import convert
from fp4train.precision import (
    BF16,
    FP32,
    MXFP8,
    NVFP4,
    LayerPolicy,
    LayerRecipe,
    autocast,
    find_layers,
    matches,
    resolve,
)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.down_norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Mlp()}) for _ in range(blocks))
        self.head = nn.Linear(16, 16)


def kept_blocks(policy: LayerPolicy, blocks: int) -> list[int]:
    layers = find_layers(Model(blocks)).values()
    return sorted(
        {x.block for x in layers if x.block is not None and policy.why_kept(x) is not None}
    )


@pytest.mark.parametrize(
    ("first", "last", "blocks", "kept"),
    [
        (0, 0.15, 6, [5]),
        (0, 0.15, 7, [5, 6]),  # 1.05 blocks are two: the share is a lower bound
        (0, 0.2, 5, [4]),  # 0.2·5 may be computed as 1.0000000000000002 and still means one
        (0, 0.1, 1, [0]),
        (0.0, 0.0, 4, []),
        (0, 1.0, 3, [0, 1, 2]),
        (2, 1, 5, [0, 1, 4]),
        (0, 99, 3, [0, 1, 2]),
        (1, 0, 3, [0]),
        # arXiv:2509.25149: the first two and the last eight of 62
        (0.03, 0.129, 62, [0, 1, *range(54, 62)]),
    ],
)
def test_integers_count_blocks_and_floats_are_shares_rounded_up(
    first: float, last: float, blocks: int, kept: list[int]
) -> None:
    assert kept_blocks(LayerPolicy(first=first, last=last), blocks) == kept


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("mlp.down", "blocks.3.mlp.down", True),
        ("mlp.down", "blocks.3.mlp.down_norm", False),
        ("lp.down", "blocks.3.mlp.down", False),
        ("down", "blocks.3.mlp.down", True),
        ("mlp.*", "blocks.3.mlp.up", True),
        ("mlp.d*", "blocks.3.mlp.up", False),
        ("blocks.3", "blocks.3.mlp.down", True),
        ("blocks.3", "blocks.31.mlp.down", False),
        ("blocks.*.up", "blocks.3.mlp.up", False),  # a star stands for one component
        ("[qk]_proj", "attention.q_proj", True),
        ("a.b.c", "b.c", False),
    ],
)
def test_patterns_match_whole_name_components(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_named_layers_are_kept_and_the_reason_says_so() -> None:
    layers = find_layers(Model(3))
    policy = LayerPolicy(last=0, keep=["mlp.down", "blocks.0"])
    kept = {
        name: policy.why_kept(layer) for name, layer in layers.items() if policy.why_kept(layer)
    }
    assert kept == {
        "inputs": "outside the blocks",
        "head": "outside the blocks",
        "blocks.0.mlp.up": "policy.keep=blocks.0",
        "blocks.0.mlp.down_norm": "policy.keep=blocks.0",
        **{f"blocks.{i}.mlp.down": "policy.keep=mlp.down" for i in range(3)},
    }
    assert (
        LayerPolicy().why_kept(find_layers(Model(6))["blocks.5.mlp.up"])
        == "policy.last=0.15 (1 of 6 blocks)"
    )
    first = LayerPolicy(first=1).why_kept(find_layers(Model(6))["blocks.0.mlp.up"])
    assert first == "policy.first=1 (1 of 6 blocks)"


class Steered(nn.Module):
    """A block with the names of Qwen3-Next, Jamba, OLMo Hybrid, Kimi Linear and AFMoE."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.in_proj_ba, self.dt_proj = (nn.Linear(16, 16) for _ in range(3))
        self.b_proj, self.f_a_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scalar = nn.Linear(16, 1)
        self.router = nn.ModuleDict({"gate": nn.Linear(16, 8)})
        self.mlp = nn.ModuleDict({"shared_expert_gate": nn.Linear(16, 1), "up": nn.Linear(16, 2)})


def test_gates_decays_and_steps_are_in_high_precision_unless_a_recipe_names_them() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Steered(), Steered()])
    layers = find_layers(model)
    policy = LayerPolicy(
        last=0,
        recipe_for_kept=MXFP8(),
        recipes=[LayerRecipe(layers=["blocks.1.dt_proj"], recipe=MXFP8())],
    )
    reasons = {name: policy.why_kept(layer) for name, layer in layers.items()}
    kept = {name: reason for name, reason in reasons.items() if reason is not None}
    by_name = {"in_proj_ba", "dt_proj", "b_proj", "f_a_proj"}
    by_name |= {"mlp.shared_expert_gate", "router.gate"}
    first = {f"blocks.0.{name}" for name in (*by_name, "scalar")}
    assert kept.keys() == first | {f"blocks.1.{name}" for name in (*by_name, "scalar")} - {
        "blocks.1.dt_proj"
    }
    assert kept["blocks.0.dt_proj"] == "dt_proj: a gate, decay or step by its name"
    assert kept["blocks.0.scalar"] == "one out feature: a gate"
    assert kept["blocks.0.router.gate"] == "router: chooses in high precision"
    recipes = {name: policy.recipe_for(layer, NVFP4()) for name, layer in layers.items()}
    assert recipes["blocks.0.scalar"] == BF16()
    assert recipes["blocks.1.dt_proj"] == MXFP8()
    assert recipes["blocks.0.mlp.up"] == recipes["blocks.0.gate_proj"] == NVFP4()


def test_one_pattern_may_be_given_as_a_word() -> None:
    assert LayerPolicy(keep="mlp.down").keep == ("mlp.down",)


def test_a_pattern_that_matches_nothing_is_an_error_where_the_model_runs() -> None:
    """The check must also run in autocast, where no plan is made."""
    model = convert(Model(2))
    policy = LayerPolicy(keep=["mlp.gate"])
    with pytest.raises(
        ValueError, match=r"policy.keep='mlp.gate' matches no linear layer; the model has: inputs, "
    ):
        policy.check(find_layers(model))
    with autocast(NVFP4(), policy=policy), pytest.raises(ValueError, match=r"mlp\.gate"):
        model.blocks[0]["mlp"].up(torch.zeros(1, 16))
    with autocast(NVFP4(), policy=LayerPolicy(keep=["mlp.up"])):
        model.blocks[0]["mlp"].down(torch.zeros(1, 16))


def test_a_pattern_of_classes_may_have_alternatives_of_which_one_is_in_the_model() -> None:
    layers = find_layers(Model(2))
    names = layers["head"].names
    for keep in ("class:Mamba2|Mlp", "class:Mlp|Mamba2:fprop+wgrad"):
        policy = LayerPolicy(last=0, keep=[keep])
        policy.check(names)
        assert policy.why_kept(layers["blocks.1.mlp.up"], "fprop") == f"policy.keep={keep}"
    assert policy.why_kept(layers["blocks.1.mlp.up"], "dgrad") is None
    with pytest.raises(ValueError, match=r"keep='class:Mamba2\|\*Attention' matches no linear"):
        LayerPolicy(keep=["class:Mamba2|*Attention"]).check(names)


@pytest.mark.parametrize("value", [-1, -0.1, 1.5, True, "2", None])
def test_an_impossible_share_or_count_names_the_field(value: object) -> None:
    with pytest.raises(ValueError, match="first="):
        LayerPolicy(first=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="last="):
        LayerPolicy(last=value)  # type: ignore[arg-type]


def test_kept_layers_may_use_another_recipe_but_the_head_stays_in_high_precision() -> None:
    layers = find_layers(Model(2))
    policy = LayerPolicy(last=1, recipe_for_kept=MXFP8())
    assert policy.recipe_for(layers["blocks.0.mlp.up"], NVFP4()) == NVFP4()
    assert policy.recipe_for(layers["blocks.1.mlp.up"], NVFP4()) == MXFP8()
    assert policy.recipe_for(layers["head"], NVFP4()) == BF16()


def test_a_high_precision_phase_holds_for_kept_layers_too() -> None:
    """Otherwise only the forward GEMM of the kept blocks would stay quantised in the cooldown."""
    layer = find_layers(Model(1))["blocks.0.mlp.up"]
    policy = LayerPolicy(last=1, recipe_for_kept=MXFP8())
    assert policy.recipe_for(
        layer, NVFP4().with_high_precision("fprop")
    ) == MXFP8().with_high_precision("fprop")


def test_single_gemms_of_a_layer_are_kept_and_the_plan_says_why() -> None:
    layers = find_layers(Model(2))
    policy = LayerPolicy(last=0, keep=["blocks.0.mlp.up:fprop", "mlp.down:dgrad+wgrad"])
    assert policy.recipe_for(layers["blocks.0.mlp.up"], NVFP4()) == NVFP4().with_high_precision(
        "fprop"
    )
    assert policy.recipe_for(layers["blocks.1.mlp.up"], NVFP4()) == NVFP4()
    down = resolve(layers["blocks.1.mlp.down"], NVFP4(), policy, "emulate", Device.of("cpu"))
    assert [gemm.operands.quantised for gemm in down.gemms] == [True, False, False]
    assert [gemm.why for gemm in down.gemms[1:]] == ["policy.keep=mlp.down:dgrad+wgrad"] * 2
    policy.check(layers)
    with pytest.raises(
        ValueError, match=r"keep='up:forward': 'forward' is no GEMM.*fprop, dgrad, wgrad"
    ):
        LayerPolicy(keep=["up:forward"])
    with pytest.raises(ValueError, match=r"policy.keep='mlp.gate:fprop' matches no linear layer"):
        LayerPolicy(keep=["mlp.gate:fprop"]).check(layers)


def test_kept_gemms_may_use_another_recipe_but_a_high_precision_phase_holds_for_them() -> None:
    layer = find_layers(Model(1))["blocks.0.mlp.up"]
    policy = LayerPolicy(last=0, keep=["up:fprop+dgrad"], recipe_for_kept=MXFP8())
    table = policy.recipe_for(layer, NVFP4()).table()
    assert table["fprop"] == MXFP8().table()["fprop"] and table["wgrad"] == NVFP4().table()["wgrad"]
    cooled = policy.recipe_for(layer, NVFP4().with_high_precision("fprop")).table()
    assert not cooled["fprop"].quantised and cooled["dgrad"] == MXFP8().table()["dgrad"]


def test_kept_layers_take_the_runs_dtype_and_an_unquantised_run_has_none() -> None:
    layer = find_layers(Model(1))["blocks.0.mlp.up"]
    policy = LayerPolicy(last=1, recipe_for_kept=MXFP8())
    assert policy.recipe_for(layer, NVFP4(dtype="float32")).dtype == "float32"
    assert policy.recipe_for(layer, FP32()) == FP32(), (
        "nothing is kept from a recipe that quantises nothing"
    )


def test_block_10_is_not_block_1() -> None:
    assert find_layers(Model(12))["blocks.11.mlp.up"].block == 11
