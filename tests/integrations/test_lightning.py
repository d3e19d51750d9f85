"""Lightning's Trainer with a recipe: the plain loop's bits, resumes across a phase, and
mistakes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_transformers import COOLDOWN, PHASES, POLICY, STEPS, framework, llama, loader, same

import fp4train.integrations as integrations
from fp4train.errors import UserError
from fp4train.precision import BF16, Phase

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",  # the rows are made in no time
    "ignore:.*LeafSpec:FutureWarning",  # Lightning's use of a name that torch deprecates
    "ignore:.*Checkpoint directory .* exists:UserWarning",
)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Batches:
    """Batches in order; Lightning saves and restores the place in them."""

    def __init__(self) -> None:
        self.done = 0

    def __len__(self) -> int:
        return len(loader())

    def __iter__(self) -> Iterator[Any]:
        for batch in list(loader())[self.done :]:
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def modules() -> Any:
    """Modules of Lightning's (`lightning_modules.py`)."""
    return framework("lightning_modules")


def train(
    recipe: str, accumulate: int, folder: Path, *, resume: Path | None = None, module: Any = None
) -> Any:
    """A module after `STEPS` steps, with a checkpoint half-way."""
    lightning = framework("lightning.pytorch")
    module = modules().Module(llama()) if module is None else module
    checkpoints = lightning.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=STEPS // 2, save_top_k=-1
    )
    precision = integrations.LightningPrecision(
        recipe, policy=POLICY, phases=PHASES, cooldown=COOLDOWN
    )
    trainer = lightning.Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[precision, checkpoints],
    )
    trainer.fit(module, Batches(), ckpt_path=None if resume is None else str(resume))
    return module


@pytest.mark.parametrize(
    ("recipe", "accumulate"),
    [
        ("nvfp4", 1),
        pytest.param("nvfp4", 2, marks=pytest.mark.long),
        pytest.param("fp8_delayed", 2, marks=pytest.mark.long),
    ],
)
def test_it_trains_and_resumes_as_a_plain_loop_does(
    plain: Any, recipe: str, accumulate: int, tmp_path: Path
) -> None:
    expected, wanted = plain(recipe, accumulate, within="model")
    module = train(recipe, accumulate, tmp_path)
    assert module.losses == wanted and same(module.model, expected)
    again = train(recipe, accumulate, tmp_path, resume=tmp_path / f"step={STEPS // 2}.ckpt")
    assert again.losses == wanted[STEPS // 2 * accumulate :] and same(again.model, expected)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_delayed"])
def test_a_validation_of_lightnings_average_is_that_of_its_weights_and_leaves_training_alone(
    recipe: str,
) -> None:
    """Lightning exchanges the weights by `.data` before each validation, and after it."""
    lightning = framework("lightning.pytorch")
    averages = framework("lightning.pytorch.callbacks.weight_averaging")

    def fit(validations: int) -> Any:
        module = modules().Validated(llama())
        average = averages.EMAWeightAveraging(decay=0.9)
        lightning.Trainer(
            max_steps=STEPS,
            val_check_interval=1,
            limit_val_batches=validations,
            num_sanity_val_steps=0,
            callbacks=[integrations.LightningPrecision(recipe, policy=POLICY), average],
            **QUIET,
        ).fit(module, loader(), loader())
        return module

    validated, silent = fit(1), fit(0)
    assert validated.losses == silent.losses and same(validated.model, silent.model)
    assert len(validated.validated) == STEPS
    for found, fresh in validated.validated:
        assert found == fresh


def test_a_training_step_past_the_parts_is_named_by_the_guard(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="called outside of the forward pass of the model"):
        train("nvfp4", 1, tmp_path, module=modules().Parts(llama()))


def test_a_module_that_is_not_converted_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"call model = fp4train\.convert\(model\)"):
        train("nvfp4", 1, tmp_path, module=modules().Module(llama(convert=False)))


def test_steps_of_several_optimizers_are_known_from_max_steps_alone() -> None:
    """Lightning counts each optimizer's step, and its estimate of their number one per batch."""
    lightning = framework("lightning.pytorch")
    half = Phase(start=0.5, recipe=BF16())
    callback = integrations.LightningPrecision("mxfp8", policy=None, phases=[half])
    trainer = lightning.Trainer(max_steps=4, callbacks=[callback], **QUIET)
    trainer.fit(modules().Pair([llama(), llama()]), Batches())
    assert trainer.global_step == 4
    assert callback.precision.plan is not None
    assert [stretch.start for stretch in callback.precision.plan.stretches] == [0, 2]
    callback = integrations.LightningPrecision("mxfp8", policy=None, phases=[half])
    trainer = lightning.Trainer(max_epochs=1, callbacks=[callback], **QUIET)
    with pytest.raises(UserError, match=r"does not know its number of steps.*max_steps"):
        trainer.fit(modules().Pair([llama(), llama()]), Batches())
