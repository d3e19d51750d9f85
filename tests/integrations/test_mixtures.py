"""Experts of transformers' mixtures as planned layers: the same function, names and folders, and a
loop of linear layers in every bit.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from small_transformers import SIZES, Rows, adamw, framework, loader
from torch import Tensor, nn

import fp4train as f4
import fp4train.integrations as integrations
from fp4train.errors import UserError
from fp4train.integrations import Precision
from fp4train.nn import Experts
from fp4train.optim.adamw import AdamW
from fp4train.precision import FP32, MXFP8, NVFP4, LayerPolicy, Recipe, autocast, find_layers

FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48},
    "GptOss": {"num_local_experts": 4, "swiglu_limit": 0.25},
}
"""By class of transformers: what its configuration has besides `SIZES`. gpt-oss keeps its weights
transposed, has biases, and cuts its activation off at the limit.
"""
EXPERTS = 4
TOP = 2
WIDTH = int(SIZES["hidden_size"])


def mixture(family: str) -> Any:
    """A mixture of two blocks with random weights and biases, not converted."""
    own = {**SIZES, **FAMILIES[family], "num_experts_per_tok": TOP}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**own)
    )
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def results(model: Any) -> list[Tensor]:
    """Logits, and the gradients of all parameters."""
    tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    found = model(input_ids=tokens, labels=tokens)
    found.loss.backward()
    return [found.logits.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_outputs_and_gradients_in_high_precision_are_those_of_transformers(
    family: str, implementation: str
) -> None:
    theirs = mixture(family)
    ours = f4.convert(copy.deepcopy(theirs))
    theirs.set_experts_implementation(implementation)
    expected = results(theirs)
    found = [results(ours)]
    with autocast(FP32(), step=0):
        found.append(results(ours))
    for each in found:
        for own, wanted in zip(each, expected, strict=True):
            assert (own - wanted).norm() <= 1e-6 * wanted.norm()
    assert all(
        expected[1:][number].any() for number, name in enumerate(dict(theirs.named_parameters()))
    )


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8()], ids=lambda recipe: recipe.name)
def test_written_experts_are_those_of_the_next_pass(family: str, recipe: Recipe) -> None:
    model = f4.convert(mixture(family))
    for step in range(2):
        fresh = f4.convert(mixture(family))  # one that has quantised nothing yet
        fresh.load_state_dict(model.state_dict())
        found = []
        for each in (model, fresh):
            with autocast(recipe, step=0, token_offset=0):
                found.append(results(each))
        assert all(map(torch.equal, *found)), step
        for parameter in model.parameters():
            parameter.data.mul_(-0.5)


class Loop(nn.Module):
    """The oracle: a linear layer for each expert, with the names that the experts' random keys
    document.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.of = (owner,)
        for name in ("gate_up", "down"):
            weights = getattr(owner, f"{name}_proj")
            biases = getattr(owner, f"{name}_proj_bias", None)
            made = nn.ModuleList()
            for expert, weight in enumerate(weights.mT if owner.is_transposed else weights):
                made.append(nn.Linear(*weight.T.shape, bias=biases is not None))
                made[-1].weight.data.copy_(weight)
                if biases is not None:
                    made[-1].bias.data.copy_(biases[expert])
            self.add_module(name, made)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = x.new_zeros(*chosen.shape, WIDTH)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            hidden = self.of[0]._apply_gate(self.gate_up[expert](x[token]))  # type: ignore[index]
            y = y.index_put((token, place), self.down[expert](hidden))  # type: ignore[index]
        return (y * weights[..., None]).sum(1)

    def gradients(self) -> list[Tensor]:
        found = []
        for name in ("gate_up", "down"):
            layers = list(getattr(self, name))
            grads = torch.stack([layer.weight.grad for layer in layers])
            found.append(grads.mT if self.of[0].is_transposed else grads)
            if layers[0].bias is not None:
                found.append(torch.stack([layer.bias.grad for layer in layers]))
        return found


@pytest.mark.parametrize("recipe", [NVFP4(), MXFP8()], ids=lambda recipe: recipe.name)
def test_experts_equal_a_loop_of_linears_in_every_bit(family: str, recipe: Recipe) -> None:
    """With two microbatches in each of two steps, one expert that all tokens go to, and one without
    tokens.
    """
    owner = mixture(family).model.layers[0].mlp.experts
    loop = Loop(owner)
    models = [f4.convert(nn.ModuleDict({"experts": each})) for each in (owner, loop)]
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack(
        (torch.zeros(70).long(), torch.randint(1, EXPERTS - 1, (70,), generator=generator)), 1
    )
    weights = torch.rand(70, TOP, generator=generator)
    found: list[list[Tensor]] = []
    for model in models:
        own = []
        generator = generator.manual_seed(2)
        for step in range(2):
            model.zero_grad()
            for _ in range(2):
                x = torch.randn(70, WIDTH, generator=generator, requires_grad=True)
                with autocast(recipe, seed=3, step=step):
                    y = model["experts"](x, chosen, weights)  # type: ignore[index]
                    # a layer that is not called has no gradient, where experts have zeros
                    if model is models[1]:
                        y = y + 0 * sum(p.sum() for p in model.parameters())
                y.square().sum().backward()
                assert x.grad is not None
                own += [y.detach(), x.grad]
        named = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        present = [getattr(owner, name).grad for name in named if hasattr(owner, name)]
        found.append(own + (present if model is models[0] else loop.gradients()))
    assert len(found[0]) >= 10
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def test_weight_decay_spares_the_biases_of_experts_that_their_owner_holds() -> None:
    model = f4.convert(mixture("GptOss"))
    groups = AdamW(weight_decay=0.2).build(model).param_groups
    spared = {
        parameter for group in groups if not group["weight_decay"] for parameter in group["params"]
    }
    decayed = {name for name, p in model.named_parameters() if p.dim() > 1 and p not in spared}
    assert not [name for name in decayed if name.endswith("bias")]
    assert "model.layers.0.mlp.experts.gate_up_proj" in decayed


def test_the_plan_lists_all_weights_but_routers_and_names_stay(family: str) -> None:
    theirs = mixture(family)
    ours = f4.convert(copy.deepcopy(theirs))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    planned = {
        layer.layer.name: layer.layer.weights
        for layer in f4.plan(ours, NVFP4()).stretches[0].layers.values()
    }
    matrices = {
        name: each.numel()
        for name, each in ours.named_parameters()
        if each.dim() > 1
        and "embed" not in name
        and not name.endswith(("bias", "gate.weight", "router.weight"))
    }
    assert sum(planned.values()) == sum(matrices.values()) and len(planned) == len(matrices)
    assert (
        planned["model.layers.1.mlp.experts.gate_up"]
        == matrices["model.layers.1.mlp.experts.gate_up_proj"]
    )
    found = f4.conversion(ours)
    assert not found.left + found.others and found.summary() == ""
    assert {each.why for each in found.meant} == {"router: chooses in high precision"}
    layer = find_layers(ours)["model.layers.0.mlp.experts.down"]
    assert (layer.experts, layer.per_token, layer.block, layer.out_features) == (
        EXPERTS,
        TOP,
        0,
        WIDTH,
    )


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_trainer_trains_them_and_its_folder_has_the_same_names(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = f4.convert(mixture(family))
    options: dict[str, Any] = {
        "max_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    theirs = framework("transformers.trainer")
    args = theirs.TrainingArguments(
        str(tmp_path / "run"), save_strategy="no", logging_steps=1, **options
    )
    trainer = theirs.Trainer(
        model,
        args,
        train_dataset=Rows(),
        callbacks=[integrations.TrainerPrecision("nvfp4", policy="all")],
    )
    trainer.train()
    moved = {
        name
        for name, each in mixture(family).named_parameters()
        if not torch.equal(each, model.get_parameter(name))
    }
    assert {name for name, _ in model.named_parameters() if "experts" in name} <= moved
    assert "in the first step" not in caplog.text
    names = []
    theirs = mixture(family)
    theirs.config.use_cache = model.config.use_cache  # which the Trainer sets
    for number, each in enumerate((model, theirs)):
        each.save_pretrained(tmp_path / str(number))
        with safe_open(tmp_path / str(number) / "model.safetensors", "pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]
    assert (tmp_path / "0" / "config.json").read_text() == (
        tmp_path / "1" / "config.json"
    ).read_text()
    read = type(model).from_pretrained(tmp_path / "0").state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(each, read[name]) for name, each in model.state_dict().items())


def test_the_guard_names_experts_that_another_implementation_multiplies() -> None:
    model = f4.convert(mixture("Mixtral"))
    own = Precision("nvfp4", policy=LayerPolicy(last=1))
    own.attach(model, steps=2)
    optimizer = adamw(model)
    own.count(optimizer)
    model.model.layers[0].mlp.experts.config._experts_implementation = "eager"  # type: ignore[union-attr, index]
    model(**next(iter(loader()))).loss.backward()
    with pytest.raises(
        UserError, match=r"experts\.gate_up, .*experts\.down: planned in NVFP4 and not called"
    ):
        optimizer.step()


def test_neither_copies_nor_models_of_the_same_configuration_share_a_converted_models_experts() -> (
    None
):
    first = mixture("Mixtral")
    other = type(first)(first.config)
    f4.convert(first)
    twin = copy.deepcopy(first)
    before = [each.clone() for each in results(first)]
    for parameter in first.parameters():
        parameter.data.zero_()
    assert all(torch.equal(*each) for each in zip(results(twin), before, strict=True))
    assert (
        not any(isinstance(each, Experts) for each in other.modules()) and results(other)[0].any()
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            lambda experts: delattr(experts, "is_transposed"),
            "whose layout this release of transformers does not note",
        ),
        (
            lambda experts: setattr(experts, "_is_expert_parallel", True),
            "cut by transformers' expert parallelism",
        ),
    ],
    ids=["first releases of 5", "expert parallelism"],
)
def test_experts_that_stay_outside_are_named_with_the_reason(
    family: str, changed: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first releases of transformers 5 do not note how weights are laid out."""
    model = mixture(family)
    for block in model.model.layers:
        changed(block.mlp.experts)
    made = f4.convert(model)
    assert "4 tensors in model.layers.*.mlp.experts" in caplog.text and said in caplog.text
    reasons = {weight.why for weight in f4.conversion(made).others if "experts" in weight.module}
    assert len(reasons) == 1 and said in reasons.pop()
    assert not any(isinstance(module, Experts) for module in made.modules())
