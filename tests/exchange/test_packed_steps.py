"""Which steps of a run the codes and the scales of activations of a packed folder come from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import FinishedRuns
from hf_exports import FUSED, SHORT, Command, amaxes, module_of, weights
from safetensors.torch import load_file

from fp4train.exchange import (
    NamedRecipe,
    export_quantised,
    held_out,
    load_trained,
    quantised,
    verify,
)
from fp4train.precision import NVFP4
from fp4train.quantize import quantize

Served = Callable[..., Any]


def test_a_run_that_ends_in_bf16_is_packed_by_its_last_quantised_stretch(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    """Both losses are said. Fused layers that were trained apart are quantised again, which is said
    with its cost.
    """
    run = finished("recipe=nvfp4")
    shown = command("export", run, "to=compressed-tensors", f"out={tmp_path / 'packed'}")
    assert (
        "The codes are those of steps 0–4: NVFP4 (recipe), made of the weights at step 6." in shown
    )
    own = weights(run)
    smaller = sum(bool(own[layer].abs().amax() < amax) for layer, amax in amaxes(own).items())
    assert smaller > 0 and f"{smaller} of 7 weights are quantised again" in shown
    (line,) = (each for each in shown.splitlines() if each.startswith("Validation loss"))
    assert (
        " in high precision" in line
        and " in NVFP4, " in line
        and " in NVFP4 with fused scales" in line
    )
    card = (tmp_path / "packed" / "README.md").read_text()
    assert line in card and "quantised again" in card


def test_the_stretch_of_an_earlier_checkpoint_ends_there(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    run = finished("recipe=nvfp4", "phases=none", "checkpoint.every=2")
    out = tmp_path / "earlier"
    shown = command("export", run, "to=compressed-tensors", f"out={out}", "step=4", "losses=false")
    assert (
        "The codes are those of steps 0–3: NVFP4 (recipe), made of the weights at step 4." in shown
    )
    assert verify(out, run).equal


def test_with_fused_scales_nothing_is_quantised_again(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished(*SHORT, "recipe.fused_scales=true", "phases=none")
    made = export_quantised(run, tmp_path / "a", "compressed-tensors")
    assert any(note.startswith("No weight was quantised again: all 7") for note in made.notes)
    found = load_file(tmp_path / "a" / "model.safetensors")
    for group in FUSED:
        modules = [module_of(run, f"blocks.0.{name}") for name in group]
        for scale in ("weight_global_scale", "input_global_scale"):
            assert len({float(found[f"{module}.{scale}"]) for module in modules}) == 1


def test_the_loss_that_is_named_for_served_codes_is_that_of_the_codes(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    """Weights that are set to the served values give it without fused scales."""
    run = finished("recipe=nvfp4")
    export_quantised(run, tmp_path / "a", "compressed-tensors")
    losses = json.loads((tmp_path / "a" / "fp4train.json").read_text())["losses"]
    trained = load_trained(run)
    own = weights(run)
    spec = NVFP4().table()["fprop"].second
    for layer, amax in amaxes(own).items():
        served = quantize(own[layer], spec, amax=amax).dequantize()
        trained.model.get_submodule(layer).weight.data.copy_(served)
    weight_only = NVFP4(fused_scales=True)
    named = NamedRecipe(name="served", recipe=weight_only, policy=trained.config.policy)
    (score,) = held_out(trained, [named], trained.config.eval.batches)
    assert losses["NVFP4 with fused scales"] == pytest.approx(score.values["loss"], abs=2e-5)
    assert losses["NVFP4 with fused scales"] != losses["NVFP4"]


def test_a_plan_that_divides_what_serving_software_fuses_is_said(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished(*SHORT, "policy.keep=[attention.wv]")
    made = export_quantised(
        run, tmp_path / "a", "modelopt", measures=quantised.Measures(losses=False)
    )
    (note,) = (each for each in made.notes if "may refuse the folder" in each)
    assert "some of blocks.0.attention.wq, blocks.0.attention.wk, blocks.0.attention.wv in" in note
    assert verify(tmp_path / "a", run).equal


@pytest.mark.long
def test_another_stretch_can_be_named(finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished(
        "recipe=nvfp4",
        "+phases.late={_target_: fp4train.precision.Phase, start: 2, recipe: {_target_: "
        "fp4train.precision.MXFP8}}",
        "phases=none",
    )
    measures = quantised.Measures(losses=False)
    for stretch, name in ((0, "NVFP4"), (3, "MXFP8"), (None, "MXFP8")):
        export_quantised(
            run, tmp_path / str(stretch), "modelopt", stretch=stretch, measures=measures
        )
        config = json.loads((tmp_path / str(stretch) / "hf_quant_config.json").read_text())
        assert config["quantization"]["quant_algo"] == name


def test_the_scales_of_activations_are_those_that_the_run_measured(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished("recipe=nvfp4", "eval.errors_every=2")
    made = export_quantised(
        run, tmp_path / "a", "modelopt", measures=quantised.Measures(losses=False)
    )
    assert any("last 2 measured steps" in note for note in made.notes)
    from fp4train.track import read_statistics

    columns = read_statistics(run).operands
    here = (
        (columns["operand"] == "fprop.x")
        & (columns["layer"] == "blocks.0.mlp.down")
        & (columns["step"] <= 4)
    )
    found = load_file(tmp_path / "a" / "model.safetensors")[
        "model.layers.0.mlp.down_proj.input_scale"
    ]
    assert torch.equal(found, torch.tensor(float(columns["amax"][here].max())) / 2688)


def test_calibration_sees_the_largest_activation(finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished("recipe=nvfp4")
    sizes = []
    for batches in (1, 8):
        measures = quantised.Measures(losses=False, calibrate=batches)
        export_quantised(run, tmp_path / str(batches), "compressed-tensors", measures=measures)
        found = load_file(tmp_path / str(batches) / "model.safetensors")
        sizes.append(
            [
                2688 / float(value)
                for name, value in found.items()
                if name.endswith("input_global_scale")
            ]
        )
    assert len(sizes[0]) == 7
    assert (
        all(one <= all_of_them for one, all_of_them in zip(*sizes, strict=True))
        and sizes[0] != sizes[1]
    )
