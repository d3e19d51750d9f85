"""Experts in the plan, in policies by class and in costs: all weights count, a share of them
multiplies a token.
"""

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import fp4train as f4
from fp4train.config import bind
from fp4train.hardware import Device
from fp4train.measure import watch
from fp4train.models.common import multiplications
from fp4train.nn import Experts
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Delayed,
    LayerPlan,
    LayerPolicy,
    LayerRecipe,
    Recipe,
    TetraJetV2,
    autocast,
    find_layers,
    resolve,
    wire_form,
)
from fp4train.quantize import RandomKey

WIDTH = 32
HIDDEN = 64
EXPERTS = 4
TOP = 2
CPU = Device(type="cpu")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Experts(EXPERTS, WIDTH, HIDDEN, per_token=TOP)
        self.down = Experts(EXPERTS, HIDDEN, WIDTH, bias=True, per_token=TOP)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mixture()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def converted() -> nn.Module:
    return f4.convert(Model())


def experts_in(recipe: Recipe) -> LayerPlan:
    layer = find_layers(converted())["blocks.0.mlp.up"]
    return resolve(layer, recipe, None, "auto", CPU)


def test_the_plan_lists_every_weight_and_the_number_of_experts() -> None:
    model = converted()
    plan = f4.plan(model, NVFP4(), LayerPolicy(last=0), tokens=128)
    weights = sum(p.numel() for name, p in model.named_parameters() if name.endswith("weight"))
    assert sum(layer.weights for layer in find_layers(model).values()) == weights
    assert f4.conversion(model).share == 1
    assert "mlp.up (4 experts)" in plan.render(full=True)
    rows = {(row.layer.name, row.gemm): row for row in plan.rows}
    assert rows["blocks.0.mlp.up", "fprop"].size == (128 * TOP, HIDDEN, WIDTH)
    assert rows["blocks.0.mlp.up", "wgrad"].size == (HIDDEN, WIDTH, 128 * TOP)


def test_a_policy_gives_attention_another_recipe_than_experts_by_class() -> None:
    layers = find_layers(converted())
    policy = LayerPolicy(last=0, recipes=[LayerRecipe(layers=["class:Att*"], recipe=MXFP8())])
    found = {name: resolve(layer, NVFP4(), policy, "auto", CPU) for name, layer in layers.items()}
    assert found["blocks.0.mlp.down"].fprop.elements == "E2M1·E2M1"
    wq = found["blocks.0.attention.wq"]
    assert wq.fprop.elements == "E4M3·E4M3" and wq.fprop.why.startswith(
        "policy.recipes=class:Att*; "
    )
    cooldown = resolve(
        layers["blocks.0.attention.wq"], NVFP4().with_high_precision("fprop"), policy, "auto", CPU
    )
    assert [gemm.operands.quantised for gemm in cooldown.gemms] == [False, True, True]
    assert policy.recipe_for(layers["blocks.0.attention.wq"], BF16()) == BF16()


def test_a_class_is_kept_whole_or_by_gemm() -> None:
    layers = find_layers(converted())
    policy = LayerPolicy(last=0, keep=["class:Experts:wgrad", "class:Attention"])
    assert policy.why_kept(layers["blocks.1.mlp.up"]) is None
    assert policy.why_kept(layers["blocks.1.mlp.up"], "wgrad") == "policy.keep=class:Experts:wgrad"
    assert policy.why_kept(layers["blocks.1.attention.wo"]) == "policy.keep=class:Attention"


def test_recipes_by_class_are_written_in_yaml() -> None:
    node = OmegaConf.to_container(
        OmegaConf.create(
            "{recipes: [{layers: ['class:Experts'], recipe: {_target_: "
            "fp4train.precision.MXFP8}}], last: 0}"
        )
    )
    policy = bind({"_target_": "fp4train.precision.LayerPolicy", **node}, LayerPolicy, "policy")  # type: ignore[dict-item]
    assert policy.recipes == (LayerRecipe(layers=("class:Experts",), recipe=MXFP8()),) and hash(
        policy
    )


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (
            LayerPolicy(keep=["class:Expert"]),
            r"'class:Expert' matches no linear layer; the model has: class:Linear",
        ),
        (
            LayerPolicy(recipes=[LayerRecipe(layers=["gate"], recipe=MXFP8())]),
            r"policy\.recipes='gate' matches no",
        ),
    ],
)
def test_a_pattern_that_no_layer_has_is_an_error(policy: LayerPolicy, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        f4.plan(converted(), NVFP4(), policy)


def test_recipes_of_layers_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="names no layer"):
        LayerRecipe(layers=[], recipe=MXFP8())
    with pytest.raises(ValueError, match="names GEMMs, and a recipe here is that of a whole layer"):
        LayerRecipe(layers=["up:fprop"], recipe=MXFP8())
    with pytest.raises(TypeError, match="must be LayerRecipe"):
        LayerPolicy(recipes=["up"])  # type: ignore[list-item]


def test_a_token_meets_its_share_of_the_experts() -> None:
    model = converted()
    dense = 2 * WIDTH * WIDTH
    assert multiplications(model.get_submodule("blocks.0"), 64) == dense + TOP * (
        2 * WIDTH * HIDDEN + WIDTH
    )


@pytest.mark.parametrize(
    ("recipe", "shards", "coded", "why"),
    [
        (NVFP4(), 2, True, None),
        (MXFP8(), 4, True, None),
        (NVFP4(), 3, False, "4 experts do not divide over 3 shards"),
        (FP8Delayed(), 2, False, "history of each expert's amaxes"),
    ],
)
def test_shards_of_whole_experts_are_sent_as_codes(
    recipe: Recipe, shards: int, coded: bool, why: str | None
) -> None:
    form = wire_form(experts_in(recipe), shards, "recipe")
    assert form.coded == coded and (why or "") in (form.why or "") and not form.rounds


def test_statistics_of_experts_are_those_of_the_one_with_the_most_rows() -> None:
    experts = Experts(3, WIDTH, HIDDEN)
    x = torch.randn(60, WIDTH).bfloat16().requires_grad_()
    dy: list[Tensor] = []
    with watch([(experts.layer, experts)]) as watched, autocast(TetraJetV2(), step=0):
        y = experts(x, [10, 40, 5])
    y.register_hook(dy.append)
    y.float().square().sum().backward()
    seen = watched.seen["experts"]
    assert seen.x is not None and seen.w is not None and seen.dy is not None
    assert torch.equal(seen.x.rows, x[10:50]) and torch.equal(seen.w.rows, experts.weight[1])
    assert torch.equal(seen.dy.rows, dy[0][10:50])
    plans = {"experts": resolve(experts.layer, NVFP4(), None, "auto", CPU)}
    measured = watched.measure(plans, RandomKey(seed=0, step=0, layer=0, operand=0))
    assert len(measured.values) == 6 and measured.values.isfinite().all()
