"""The core that the callbacks share, in a plain loop: bits, recomputation, evaluation, and what is
refused.
"""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import transformers
from lengths import long_but
from small_transformers import (
    COOLDOWN,
    PHASES,
    POLICY,
    SIZES,
    STEPS,
    adamw,
    layers,
    llama,
    loader,
    same,
)
from torch import Tensor, nn

import fp4train as f4
from fp4train.errors import UserError
from fp4train.integrations import Precision
from fp4train.precision import BF16, MXFP8, NVFP4, FP8Delayed, Phase, current


def precision(**options: Any) -> Precision:
    return Precision(
        **{"recipe": "nvfp4", "policy": POLICY, "phases": PHASES, "cooldown": COOLDOWN, **options}
    )


def trained(
    own: Precision, model: nn.Module, *, start: int = 0, stop: int = STEPS, accumulate: int = 1
) -> list[float]:
    """The losses of steps [start, stop)."""
    own.attach(model, steps=STEPS, sums=accumulate > 1)
    optimizer = adamw(model)
    losses = []
    batches = list(loader())
    own.count(optimizer)
    for step in range(start, stop):
        for each in batches[step * accumulate :][:accumulate]:
            loss = model(**each).loss
            (loss / accumulate).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_a_plain_loop_equals_autocast_in_every_bit(
    plain: Any, recipe: str, accumulate: int
) -> None:
    model = llama()
    losses = trained(precision(recipe=recipe), model, accumulate=accumulate)
    expected, wanted = plain(recipe, accumulate)
    assert losses == wanted and same(model, expected)
    assert losses[-1] < losses[0]


def test_a_state_restores_step_and_scales() -> None:
    model = llama()
    own = precision(recipe="fp8_delayed")
    trained(own, model, stop=3)
    state = pickle.loads(pickle.dumps(own.state_dict()))
    assert state["step"] == 3 and state["layers"]
    other = precision(recipe=FP8Delayed())
    other.load_state_dict(state)
    other.attach(llama(), steps=STEPS)
    assert other.step == 3
    again = other.state_dict()["layers"]
    assert all(
        torch.equal(t, again[name][key])
        for name, each in state["layers"].items()
        for key, t in each.items()
    )


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_their_own_checkpointing_switch_changes_no_bit(plain: Any, recipe: str) -> None:
    """Without kwargs; with two microbatches, whose recomputation must repeat the first pass of
    each.
    """
    model = llama()
    model.activation_checkpointing_enable()  # type: ignore[operator]
    losses = trained(precision(recipe=recipe), model, accumulate=2)
    expected, wanted = plain(recipe, 2)
    assert losses == wanted and same(model, expected)


class EMAModel:
    """What diffusers' average of this name (training_utils.py) does to parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.temp_stored_params: list[Tensor] = []

    @torch.no_grad()
    def step(self, parameters: list[nn.Parameter]) -> None:
        for s_param, param in zip(self.shadow_params, parameters, strict=True):
            s_param.sub_(0.1 * (s_param - param))

    def store(self, parameters: list[nn.Parameter]) -> None:
        self.temp_stored_params = [param.detach().cpu().clone() for param in parameters]

    def copy_to(self, parameters: list[nn.Parameter]) -> None:
        for s_param, param in zip(self.shadow_params, parameters, strict=True):
            param.data.copy_(s_param.to(param.device).data)

    def restore(self, parameters: list[nn.Parameter]) -> None:
        for c_param, param in zip(self.temp_stored_params, parameters, strict=True):
            param.data.copy_(c_param.data)


@pytest.mark.parametrize("recipe", long_but(["fp8_delayed"], ["nvfp4", "fp8_delayed"]))
def test_an_evaluation_of_an_average_is_that_of_its_weights_and_leaves_training_alone(
    recipe: str,
) -> None:
    """Between two microbatches of a step, and after the fused optimizer's step."""

    def losses(evaluates: bool) -> list[float]:
        model = llama()
        own = precision(recipe=recipe, phases=())
        own.attach(model, steps=STEPS, sums=True)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=3e-3, fused=True)
        own.count(optimizer)
        average = EMAModel(parameters)
        found = []
        for number, batch in zip(range(6), loader(), strict=False):
            loss = model(**batch).loss
            loss.backward()
            found.append(loss.item())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                average.step(parameters)
            if evaluates:
                average.store(parameters)
                average.copy_to(parameters)
                with torch.no_grad():
                    fresh = copy.deepcopy(model)
                    assert model(**batch).loss == fresh(**batch).loss, number
                average.restore(parameters)
        return found

    assert losses(True) == losses(False)


def test_recomputation_that_is_not_theirs_is_an_error_that_names_the_fix() -> None:
    model = llama()
    block = model.model.layers[0]  # type: ignore[union-attr, index]
    inner = block.forward
    block.forward = lambda x, **more: torch.utils.checkpoint.checkpoint(
        inner, x, use_reentrant=False, **more
    )
    with pytest.raises(RuntimeError, match=r"context_fn=fp4train\.precision\.recompute_contexts"):
        trained(precision(), model)


@pytest.mark.parametrize("evaluates", [True, False])
def test_evaluation_runs_in_the_recipe_or_as_without_fp4train(evaluates: bool) -> None:
    own = precision(evaluates=evaluates)
    model = llama()
    batch = next(iter(loader()))
    own.attach(model, steps=STEPS)
    with torch.no_grad():
        found = model.eval()(**batch).loss
        high = llama(convert=False).eval()(**batch).loss
        with f4.autocast(NVFP4(), policy=POLICY, step=0):
            low = llama().eval()(**batch).loss
    assert low != high and found == (low if evaluates else high)


def test_an_autocast_of_the_caller_is_obeyed_and_an_error_in_forward_leaves_no_recipe_behind() -> (
    None
):
    own = precision()
    model = llama()
    batch = next(iter(loader()))
    own.attach(model, steps=STEPS)
    with f4.autocast(BF16()):
        found = model(**batch).loss
        assert current() is not None
    with f4.autocast(BF16()):
        assert found == llama()(**batch).loss
    with pytest.raises(TypeError):
        model(input_ids=3)
    assert current() is None


def test_copies_and_pickles_of_the_model_run_in_its_precision_and_are_copies() -> None:
    own = precision()
    model = llama()
    batch = next(iter(loader()))
    own.attach(model, steps=STEPS)
    average = copy.deepcopy(model)
    with torch.no_grad():
        average.lm_head.weight.zero_()  # type: ignore[union-attr, operator]
        assert model(**batch).loss != average(**batch).loss
    assert pickle.loads(pickle.dumps(model))(**batch).loss == llama_in_recipe(batch)


def llama_in_recipe(batch: Any) -> torch.Tensor:
    with f4.autocast(NVFP4(), policy=POLICY, step=0):
        loss: torch.Tensor = llama()(**batch).loss
    return loss


def test_names_objects_and_configurations_mean_the_same() -> None:
    by_name = Precision("mxfp8", policy="last15", phases="cooldown_fprop", cooldown=0.5)
    made = Precision(
        MXFP8(), phases=[Phase(start="cooldown", recipe=BF16(), gemms=["fprop"])], cooldown=0.5
    )
    again = Precision(**by_name.settings)
    assert by_name.settings == made.settings == again.settings


def test_changed_settings_are_said_when_a_state_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    own = precision()
    own.attach(llama(), steps=STEPS)
    other = precision(recipe="mxfp8")
    other.load_state_dict(own.state_dict())
    other.attach(llama(), steps=STEPS)
    assert (
        "another recipe than the checkpoint" in caplog.text and "another phases" not in caplog.text
    )


def test_a_second_precision_takes_the_place_of_the_first_and_detach_ends_it() -> None:
    model = llama()
    batch = next(iter(loader()))
    first = precision()
    second = precision(recipe="mxfp8")
    for own in (first, second):
        own.attach(model, steps=STEPS)
    with f4.autocast(MXFP8(), policy=POLICY, step=0):
        expected = llama()(**batch).loss
    assert model(**batch).loss == expected
    first.stepped()  # its loop goes on; the layers that it no longer sees are no alarm
    second.detach()
    assert model(**batch).loss == llama(convert=False)(**batch).loss


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"a": nn.Linear(32, 32), "out": nn.Linear(32, 32)}) for _ in "ab"]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.nn.functional.linear(block["a"](x), block["out"].weight)  # type: ignore[index]
        return x


def test_the_guard_names_a_layer_whose_weight_other_code_multiplies() -> None:
    own = precision(policy=None)
    model = f4.convert(Fused())
    own.attach(model, steps=STEPS)
    optimizer = adamw(model)
    own.count(optimizer)
    model(torch.randn(16, 32)).sum().backward()
    with pytest.raises(
        UserError, match=r"blocks\.0\.out, blocks\.1\.out: planned in NVFP4 .* policy\.keep=\[out\]"
    ):
        optimizer.step()


MAMBA = {
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "chunk_size": 32,
    "hidden_size": 64,
}
FAMILIES = {
    "Qwen3ForCausalLM": SIZES,
    "GPT2LMHeadModel": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "Mamba2ForCausalLM": {**MAMBA, "vocab_size": 128, "num_hidden_layers": 2, "use_cache": False},
    "Qwen3MoeForCausalLM": {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
    "GptOssForCausalLM": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_guard_has_nothing_to_say_of_families_that_call_their_layers(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = getattr(transformers, family)
    model = f4.convert(kind(kind.config_class(**FAMILIES[family])))
    own = precision(policy=None)
    own.attach(model, steps=STEPS)
    optimizer = adamw(model)
    own.count(optimizer)
    model(**next(iter(loader()))).loss.backward()
    optimizer.step()
    assert own.step == 1 and "in the first step" not in caplog.text


def test_the_guard_names_layers_that_are_called_past_the_model() -> None:
    own = precision(policy=None)
    model = llama()
    own.attach(model, steps=STEPS)
    optimizer = adamw(model)
    own.count(optimizer)
    model.model(input_ids=torch.ones(1, 32, dtype=torch.long))[0].sum().backward()  # type: ignore[operator]
    with pytest.raises(
        UserError, match="or it was called outside of the forward pass of the model"
    ):
        optimizer.step()


def test_ranks_draw_from_token_ranges_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(rank: int, ranks: int) -> list[torch.Tensor]:
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: ranks > 1)
        monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
        own = precision()
        model = llama()
        own.attach(model, steps=STEPS)
        model(**next(iter(loader()))).loss.backward()
        return [layer.weight.grad for layer in layers(model) if layer.weight.grad is not None]

    alone = loss_of(0, 1)
    first = loss_of(0, 2048)
    last = loss_of(2047, 2048)
    assert all(torch.equal(a, b) for a, b in zip(alone, first, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, last, strict=True))


def test_mistakes_are_named_with_their_fix() -> None:
    for options, said in {
        (("recipe", "nvfp5"),): "recipe=nvfp5: there is no such recipe; did you mean",
        (("policy", "last16"),): "policy=last16: there is no such policy; did you mean 'last15'",
        (("phases", "cooldown"),): "did you mean",
        (("recipe", ()),): "must be a name, such as those of `fp4train recipe=`, or a Recipe",
        (("cooldown", 1.5),): "cooldown=1.5 must be a step",
        (("cooldown", -1),): "cooldown=-1 must be a step",
    }.items():
        with pytest.raises((UserError, TypeError), match=re.escape(said)):
            Precision(**dict(options))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"give an object, NVFP4\(\)"):
        Precision(NVFP4)  # type: ignore[arg-type]
    for own, model, said in [
        (Precision(), llama(convert=False), r"call model = fp4train\.convert\(model\) before"),
        (
            Precision(policy={"keep": ["q_prj"]}),
            llama(),
            r"policy\.keep='q_prj' matches no linear layer",
        ),
        (Precision(phases="cooldown_fprop"), llama(), "give cooldown="),
    ]:
        with pytest.raises(UserError, match=said):
            own.attach(model, steps=STEPS)
    with pytest.raises(UserError, match="does not know its number of steps"):
        Precision(phases="cooldown_fprop", cooldown=0.5).attach(llama(), steps=None)


def test_experts_in_3d_parameters_without_transformers_interface_are_refused_with_their_share() -> (
    None
):
    torch.manual_seed(0)
    model = Fused()
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(8, 64, 32))
    f4.convert(model)
    with pytest.raises(
        UserError, match=r"% of the matrix weights are not converted: .*3-D expert parameters"
    ):
        Precision().attach(model, steps=STEPS)
    Precision(unconverted=0.9).attach(model, steps=STEPS)


def test_weights_that_are_cut_over_ranks_are_refused() -> None:
    model = llama()
    layer = next(layers(model))
    layer.weight = nn.Parameter(torch.empty(0))  # as ZeRO-3 leaves it
    with pytest.raises(UserError, match="use DDP, or fp4train's own loop"):
        Precision().attach(model, steps=STEPS)


def test_converting_after_the_optimizer_is_made_keeps_its_parameters() -> None:
    model = llama(convert=False)
    optimizer = adamw(model)
    f4.convert(model)
    own = precision()
    own.attach(model, steps=STEPS)
    own.count(optimizer)
    before = [p.clone() for p in model.parameters()]
    model(**next(iter(loader()))).loss.backward()
    optimizer.step()
    assert own.step == 1 and not all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
