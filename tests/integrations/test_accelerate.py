"""A loop with Accelerate and a recipe: the plain loop's bits, resumes across a phase, and
mistakes.
"""

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from lengths import long_but
from small_transformers import COOLDOWN, PHASES, POLICY, STEPS, adamw, llama, loader, same
from torch import nn

from fp4train.errors import UserError
from fp4train.integrations import AcceleratePrecision


def train(
    recipe: str, accumulate: int = 1, *, save: Path | None = None, load: Path | None = None
) -> tuple[nn.Module, list[float]]:
    """The model after `STEPS` steps and the losses; half-way `save` is written, or the loop goes on
    from `load`.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = llama()
    model, optimizer, batches = accelerator.prepare(model, adamw(model), loader())
    options: dict[str, Any] = {"policy": POLICY, "phases": PHASES, "cooldown": COOLDOWN}
    precision = AcceleratePrecision(accelerator, model, optimizer, recipe, steps=STEPS, **options)
    losses = []
    if load is not None:
        accelerator.load_state(str(load))
        batches = accelerator.skip_first_batches(batches, STEPS // 2 * accumulate)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if save is not None and accelerator.sync_gradients and precision.step == STEPS // 2:
            accelerator.save_state(str(save))
        if precision.step == STEPS:
            break
    return accelerator.unwrap_model(model), losses


@pytest.mark.parametrize("accumulate", long_but([2], [1, 2]))
@pytest.mark.parametrize("recipe", long_but(["fp8_delayed"], ["nvfp4", "fp8_delayed"]))
def test_it_trains_and_resumes_as_a_plain_loop_does(
    plain: Any, recipe: str, accumulate: int, tmp_path: Path
) -> None:
    expected, wanted = plain(recipe, accumulate)
    model, losses = train(recipe, accumulate, save=tmp_path / "half")
    assert losses == wanted and same(model, expected)
    model, losses = train(recipe, accumulate, load=tmp_path / "half")
    assert losses == wanted[STEPS // 2 * accumulate :] and same(model, expected)


def test_an_optimizer_that_is_not_prepared_is_refused() -> None:
    model = llama()
    with pytest.raises(
        UserError, match=r"pass what accelerator\.prepare\(model, optimizer, …\) returned"
    ):
        AcceleratePrecision(Accelerator(cpu=True), model, adamw(model), steps=STEPS)


def test_a_model_that_is_not_converted_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = llama(convert=False)
    model, optimizer = accelerator.prepare(model, adamw(model))
    with pytest.raises(UserError, match=r"call model = fp4train\.convert\(model\)"):
        AcceleratePrecision(accelerator, model, optimizer, steps=STEPS)
