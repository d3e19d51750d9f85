"""transformers' Trainer with a recipe: the plain loop's bits, resumes across a phase, and
mistakes.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from compiled_layers import needs_graphs
from forked import forked_ranks
from small_transformers import (
    BATCH,
    COOLDOWN,
    PHASES,
    POLICY,
    SIZES,
    STEPS,
    Rows,
    adamw,
    framework,
    llama,
    same,
)

import fp4train as f4
import fp4train.integrations as integrations
from fp4train.errors import UserError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",  # the name that all guides use
    # the Trainer's loader asks for it on a machine without a GPU
    "ignore:.*pin_memory.*:UserWarning",
)


def train(
    folder: Path,
    recipe: str = "nvfp4",
    *,
    resume: str | None = None,
    model: Any = None,
    **options: Any,
) -> Any:
    """A Trainer after `STEPS` steps."""
    model = llama() if model is None else model
    transformers = framework("transformers.trainer")
    args = transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH,
            "save_steps": 3,
            "logging_steps": 1,
            "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        }
    )
    callback = integrations.TrainerPrecision(
        recipe, policy=POLICY, phases=PHASES, cooldown=COOLDOWN
    )
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rows: dict[str, Any] = {"train_dataset": Rows(), "eval_dataset": Rows(4)}
    trainer = transformers.Trainer(
        model, args, **rows, callbacks=[callback], optimizers=(optimizer, schedule)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Uninterrupted runs with two microbatches in a step, one per recipe."""
    made: dict[str, Any] = {}

    def run(recipe: str) -> Any:
        if recipe not in made:
            made[recipe] = train(
                tmp_path_factory.mktemp(recipe), recipe, gradient_accumulation_steps=2
            )
        return made[recipe]

    return run


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_it_trains_as_a_plain_loop_does(plain: Any, recipe: str, tmp_path: Path) -> None:
    trainer = train(tmp_path, recipe, save_strategy="no")
    model, wanted = plain(recipe)
    assert losses(trainer) == pytest.approx(wanted, rel=1e-6)
    assert same(trainer.model, model)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_a_run_that_is_resumed_before_a_phase_equals_the_whole_one_in_every_bit(
    whole: Any, recipe: str, tmp_path: Path
) -> None:
    checkpoint = f"{whole(recipe).args.output_dir}/checkpoint-3"
    resumed = train(tmp_path, recipe, resume=checkpoint, gradient_accumulation_steps=2)
    assert same(resumed.model, whole(recipe).model) and losses(resumed) == losses(whole(recipe))


def test_a_trainer_that_restores_its_callbacks_makes_the_same_one_again(
    whole: Any, tmp_path: Path
) -> None:
    resumed = train(
        tmp_path,
        "fp8_delayed",
        resume=f"{whole('fp8_delayed').args.output_dir}/checkpoint-3",
        gradient_accumulation_steps=2,
        restore_callback_states_from_checkpoint=True,
    )
    assert same(resumed.model, whole("fp8_delayed").model)


def mixtral() -> Any:
    """Two blocks of experts, not converted."""
    transformers = framework("transformers")
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    )


def test_weights_that_the_trainer_leaves_out_of_a_resume_are_named_and_the_fix_resumes(
    tmp_path: Path,
) -> None:
    """`save_pretrained` writes Mixtral's experts one by one, and the Trainer looks for them by the
    model's names.
    """
    whole = train(tmp_path, model=f4.convert(mixtral()))
    checkpoint = f"{tmp_path}/checkpoint-3"
    with pytest.raises(UserError, match=r"0\.mlp\.experts\.gate_up, .*: other weights than in the"):
        train(tmp_path / "resumed", model=f4.convert(mixtral()), resume=checkpoint)
    loaded = framework("transformers").MixtralForCausalLM.from_pretrained(checkpoint)
    resumed = train(tmp_path / "resumed", model=f4.convert(loaded), resume=checkpoint)
    assert same(resumed.model, whole.model)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_base_model_under_adapters_may_be_loaded_in_another_dtype_and_not_be_another(
    tmp_path: Path,
) -> None:
    peft = framework("peft")

    def adapted(dtype: torch.dtype, *, scale: float = 1.0) -> Any:
        base = llama().to(dtype)
        base.model.layers[0].mlp.up_proj.weight.data.mul_(scale)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))

    train(tmp_path, model=adapted(torch.bfloat16))
    checkpoint = f"{tmp_path}/checkpoint-3"
    train(tmp_path / "float32", model=adapted(torch.float32), resume=checkpoint)
    other = adapted(torch.bfloat16, scale=2.0)
    with pytest.raises(UserError, match=r"up_proj: other weights .* make the base model with the"):
        train(tmp_path / "other", model=other, resume=checkpoint)


@pytest.mark.long
def test_their_switch_for_checkpointing_changes_no_bit_and_stays_json(
    whole: Any, tmp_path: Path
) -> None:
    again = train(
        tmp_path, gradient_accumulation_steps=2, gradient_checkpointing=True, save_strategy="no"
    )
    assert same(again.model, whole("nvfp4").model)
    json.loads(again.args.to_json_string())


def test_evaluation_between_steps_changes_no_bit_of_training(whole: Any, tmp_path: Path) -> None:
    again = train(
        tmp_path,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
    )
    assert same(again.model, whole("nvfp4").model)
    found = [line["eval_loss"] for line in again.state.log_history if "eval_loss" in line]
    assert len(found) == STEPS and found[-1] < found[0]


def test_a_model_that_is_not_converted_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    transformers = framework("transformers.trainer")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(UserError, match=r"call model = fp4train\.convert\(model\) before the loop"):
        transformers.Trainer(
            llama(convert=False),
            args,
            train_dataset=Rows(),
            callbacks=[integrations.TrainerPrecision()],
        )


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: "?" + text, lambda text: 3]
)
def test_a_damaged_state_is_refused(whole: Any, tmp_path: Path, damage: Any) -> None:
    checkpoint = shutil.copytree(
        f"{whole('fp8_delayed').args.output_dir}/checkpoint-3", tmp_path / "checkpoint-3"
    )
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    attributes = state["stateful_callbacks"]["TrainerPrecision"]["attributes"]
    attributes["tensors"] = damage(attributes["tensors"])
    path.write_text(json.dumps(state))
    with pytest.raises(
        UserError, match=r"trainer_state\.json: the state of TrainerPrecision is damaged"
    ):
        train(tmp_path, "fp8_delayed", resume=str(checkpoint))


def test_a_missing_framework_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'lightning'", name="lightning")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(
        UserError, match=re.escape("needs lightning: pip install 'fp4train[integrations]'")
    ):
        integrations.__getattr__("LightningPrecision")


@pytest.mark.long
@needs_graphs
def test_a_compiled_model_trains_the_same_bits(plain: Any, tmp_path: Path) -> None:
    """The hooks stay outside of the graph; a layer that a graph calls is no alarm of the guard."""
    options = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "no"}
    trainer = train(tmp_path, **options)
    assert same(trainer.model, plain("nvfp4")[0])


@pytest.mark.long
def test_two_ranks_stay_equal_and_resume_in_every_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ddp_backend": "gloo", "gradient_accumulation_steps": 2}

    def on_rank() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        for recipe in ("nvfp4", "fp8_delayed"):
            whole = train(tmp_path / recipe / "whole", recipe, **options)
            checkpoint = str(tmp_path / recipe / "whole" / "checkpoint-3")
            again = train(tmp_path / recipe / "again", recipe, resume=checkpoint, **options)
            assert torch.distributed.get_world_size() == 2
            assert same(whole.model, again.model), recipe
            weights = torch.cat([p.detach().flatten() for p in again.model.parameters()])
            of_ranks = [torch.empty_like(weights) for _ in range(2)]
            torch.distributed.all_gather(of_ranks, weights)
            assert torch.equal(*of_ranks), recipe

    assert forked_ranks(2, on_rank) == [0, 0]
