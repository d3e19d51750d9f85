"""Runs as folders of codes: the software that they are for has the numbers of training."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command_line import STEADY, Cli
from families import folder_names
from finished_runs import FinishedRuns
from hf_exports import FP8_BLOCKS, SHORT, Command, amaxes, module_of, weights
from safetensors.torch import load_file, save_file
from served_loss import transformers_loss

from fp4train.config import to_config
from fp4train.exchange import (
    export_quantised,
    held_out,
    load_trained,
    open_stored,
    pack,
    quantised,
    verify,
)
from fp4train.exchange.huggingface import export_huggingface
from fp4train.precision import NVFP4
from fp4train.quantize import has_tensor_amax, quantize
from fp4train.run.record import directory as run_directory

Served = Callable[..., Any]
WORDS = {
    "mxfp4": ("recipe=mxfp4", "recipe.hadamard=false"),
    "nvfp4 weights alone": (
        "recipe=nvfp4_ue5m3",
        "recipe.scaling=null",
        "recipe.fprop.first=null",
        "recipe.fprop.second.scale=e4m3",
        "recipe.fprop.second.global_scale=tensor",
    ),
}
"""The words of recipes whose name is not enough."""


# -- compressed-tensors ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe",
    [
        "nvfp4",
        "nvfp4_1d_weights",
        "nvfp4 weights alone",
        "mxfp8",
        "fp8_current",
        *(name for name in ("nvfp4_four_over_six", "mxfp4", "fp8_row")),
    ],
)
def test_compressed_tensors_dequantises_every_weight_to_our_bits(
    finished: FinishedRuns, served: Served, tmp_path: Path, recipe: str
) -> None:
    run = finished(*SHORT, *WORDS.get(recipe, (f"recipe={recipe}",)))
    made = export_quantised(run, tmp_path / "a", "compressed-tensors")
    model = served(tmp_path / "a", dequantize=True)
    own = weights(run)
    joint = amaxes(weights(run))
    spec = to_config(run_directory.read_config(run)).recipe.table()["fprop"].second
    assert spec is not None and len(joint) == 7
    for layer, amax in joint.items():
        wanted = (
            quantize(own[layer], spec, amax=amax if has_tensor_amax(spec) else None)
            .dequantize()
            .bfloat16()
        )
        theirs = model.get_submodule(module_of(run, layer)).weight
        assert torch.equal(wanted, theirs.to(torch.bfloat16)), layer
        assert not torch.equal(wanted, own[layer].bfloat16())
    for layer in ("blocks.1.mlp.up", "blocks.1.attention.wo"):  # policy.last keeps it
        theirs = model.get_submodule(module_of(run, layer)).weight
        assert torch.equal(theirs, own[layer].bfloat16())
    assert any("validation loss" in note.lower() for note in made.notes)


@pytest.mark.parametrize(
    "words",
    [
        ("model.qkv_bias=true", "model.tied=false"),
        pytest.param(("model.qk_norm=true",), marks=pytest.mark.long),
    ],
)
def test_biases_norms_of_heads_and_a_head_of_its_own_stay_in_high_precision(
    finished: FinishedRuns, served: Served, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = finished("train.steps=2", *words)
    export_quantised(
        run, tmp_path / "a", "compressed-tensors", measures=quantised.Measures(losses=False)
    )
    result = verify(tmp_path / "a", run)
    assert not any(layer.differences for layer in result.layers)
    assert all("makes a Qwen2Tokenizer" in difference for difference in result.others)
    card = (tmp_path / "a/README.md").read_text()
    assert ('LLM("FOLDER", tokenizer="TOKENIZER")' in card) == bool(result.others)
    model = served(tmp_path / "a", dequantize=True)
    own = weights(run)
    joint = amaxes(weights(run))
    theirs = dict(model.named_parameters())
    shape = to_config(run_directory.read_config(run)).model
    for name, module in folder_names(shape).items():
        layer = name.removesuffix(".weight")
        wanted = own[layer].bfloat16()
        if layer in joint:
            wanted = (
                quantize(own[layer], NVFP4().table()["fprop"].second, amax=joint[layer])
                .dequantize()
                .bfloat16()
            )
        assert torch.equal(wanted, theirs[module].to(torch.bfloat16)), name


@pytest.mark.long
def test_what_a_hybrid_keeps_is_loaded_by_the_names_that_transformers_gives_it(
    finished: FinishedRuns, served: Served, tmp_path: Path
) -> None:
    """Its folder says `backbone.`; a layer that is not known as kept would be loaded without its
    weight.
    """
    sizes = (
        "model=hybrid_tiny",
        "model.width=64",
        "model.hidden=64",
        "model.scan.heads=2",
        "train.batch_size=2",
    )
    run = finished("train.steps=2", *sizes)
    export_quantised(
        run, tmp_path / "a", "compressed-tensors", measures=quantised.Measures(losses=False)
    )
    assert verify(tmp_path / "a", run).equal
    model = served(tmp_path / "a", dequantize=False)
    own = weights(run)
    theirs = dict(model.named_parameters())["model.layers.6.mixer.up_proj.weight"]
    assert torch.equal(theirs, own["blocks.6.mixer.up"].bfloat16())


@pytest.mark.long
def test_fp8_blocks_are_those_of_serving_software(
    finished: FinishedRuns, served: Served, tmp_path: Path
) -> None:
    """Transformers multiplies them, too, with activations in groups of 128."""
    run = finished("train.steps=2", "recipe=fp8_block", *FP8_BLOCKS)
    export_quantised(run, tmp_path / "a", "compressed-tensors")
    loss, _ = transformers_loss(tmp_path / "a", load_trained(run), 1)
    (score,) = held_out(load_trained(run), [load_trained(run).own], 1)
    assert loss == pytest.approx(score.values["loss"], abs=5e-3)
    model = served(tmp_path / "a", dequantize=True)
    own = weights(run)
    spec = to_config(run_directory.read_config(run)).recipe.table()["fprop"].second
    for layer in amaxes(own):
        wanted = quantize(own[layer], spec).dequantize().bfloat16()
        assert torch.equal(
            wanted, model.get_submodule(module_of(run, layer)).weight.to(torch.bfloat16)
        ), layer


@pytest.mark.long
def test_w4a4_in_transformers_has_the_loss_of_the_recipe(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    """Over 16 k tokens; a weight takes at most 0.57 bytes, and activations are quantised by their
    software.
    """
    words = (
        "model.width=128",
        "model.hidden=384",
        "model.layers=3",
        "train.batch_size=16",
        "train.seq_len=128",
    )
    run = finished(
        *words, "data=stdlib", "train.steps=60", "recipe.fused_scales=true", "phases=none"
    )
    export_quantised(run, tmp_path / "a", "compressed-tensors")
    packed = pack(open_stored(run), "compressed-tensors", None)
    assert packed.bytes_per_weight <= 0.57
    trained = load_trained(run)
    theirs, tokens = transformers_loss(tmp_path / "a", trained, 8)
    assert tokens >= 16_000
    (score,) = held_out(trained, [trained.own], 8)
    assert theirs == pytest.approx(score.values["loss"], abs=2e-3)


# -- ModelOpt --------------------------------------------------------------------------------------


@pytest.mark.long
def test_modelopts_own_quantiser_gives_the_same_bytes(
    finished: FinishedRuns, modelopt: ModuleType, tmp_path: Path
) -> None:
    """Codes, block scales, and weight_scale_2 to the last bit."""
    run = finished(*SHORT, "recipe=nvfp4_1d_weights")
    export_quantised(run, tmp_path / "a", "modelopt")
    found = load_file(tmp_path / "a" / "model.safetensors")
    own = weights(run)
    for layer, amax in amaxes(own).items():
        module = module_of(run, layer)
        theirs = modelopt.NVFP4QTensor
        double = theirs.get_weights_scaling_factor_2(torch.full((1, 16), float(amax)))
        codes, scales, _ = theirs.quantize(own[layer].clone(), 16, None, double)
        assert torch.equal(found[f"{module}.weight"], codes._quantized_data), layer
        assert torch.equal(
            found[f"{module}.weight_scale"].view(torch.uint8), scales.view(torch.uint8)
        ), layer
        assert torch.equal(found[f"{module}.weight_scale_2"], double.reshape(())), layer


@pytest.mark.long
def test_modelopt_reads_our_square_blocks(
    finished: FinishedRuns, modelopt: ModuleType, tmp_path: Path
) -> None:
    run = finished(*SHORT, "recipe=nvfp4")
    export_quantised(run, tmp_path / "a", "modelopt")
    found = load_file(tmp_path / "a" / "model.safetensors")
    own = weights(run)
    for layer, amax in amaxes(own).items():
        module = module_of(run, layer)
        wanted = quantize(own[layer], NVFP4().table()["fprop"].second, amax=amax)
        codes = modelopt.NVFP4QTensor(own[layer].shape, torch.float32, found[f"{module}.weight"])
        scales = {
            "scale": found[f"{module}.weight_scale"],
            "double_scale": found[f"{module}.weight_scale_2"],
        }
        back = codes.dequantize(dtype=torch.float32, **scales, block_sizes={-1: 16})
        assert torch.equal(back.bfloat16(), wanted.dequantize().bfloat16()), layer


@pytest.mark.long
def test_modelopts_mxfp8_is_ours(
    finished: FinishedRuns, modelopt: ModuleType, tmp_path: Path
) -> None:
    run = finished(*SHORT, "recipe=mxfp8")
    export_quantised(run, tmp_path / "a", "modelopt")
    found = load_file(tmp_path / "a" / "model.safetensors")
    own = weights(run)
    for layer in amaxes(own):
        module, (codes, scales) = (
            module_of(run, layer),
            modelopt.MXFP8QTensor.quantize(own[layer].clone()),
        )
        assert torch.equal(found[f"{module}.weight"].float(), codes._quantized_data.float()), layer
        assert torch.equal(found[f"{module}.weight_scale"], scales), layer


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_row"])
def test_modelopt_decodes_our_fp8(
    finished: FinishedRuns, modelopt: ModuleType, tmp_path: Path, recipe: str
) -> None:
    """One scale per tensor, 0-d, or one per row, [N]."""
    run = finished(*SHORT, f"recipe={recipe}")
    export_quantised(run, tmp_path / "a", "modelopt", measures=quantised.Measures(losses=False))
    found = load_file(tmp_path / "a" / "model.safetensors")
    own = weights(run)
    spec = to_config(run_directory.read_config(run)).recipe.table()["fprop"].second
    for layer, amax in amaxes(own).items():
        module = module_of(run, layer)
        codes = found[f"{module}.weight"]
        scale = found[f"{module}.weight_scale"]
        assert scale.shape == (() if recipe == "fp8_current" else codes.shape[:1])
        theirs = modelopt.FP8QTensor(codes.shape, torch.float32, codes).dequantize(
            scale=scale.reshape(-1, 1)
        )
        wanted = quantize(
            own[layer], spec, amax=amax if recipe == "fp8_current" else None
        ).dequantize()
        assert torch.equal(theirs, wanted), layer
        assert (f"{module}.input_scale" in found) == (recipe == "fp8_current")
    assert verify(tmp_path / "a", run).equal


@pytest.mark.long
def test_codes_in_several_files_are_those_of_one(finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished(*SHORT, "recipe=nvfp4")
    for name, shard in (("one", 10**9), ("many", 10_000)):
        measures = quantised.Measures(losses=False)
        export_quantised(run, tmp_path / name, "modelopt", measures=measures, shard=shard)
        assert verify(tmp_path / name, run).equal
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = [load_file(each) for each in (tmp_path / "many").glob("model-*.safetensors")]
    assert len(parts) > 3 and sum(map(len, parts)) == len(whole)
    assert all(torch.equal(whole[name], tensor) for part in parts for name, tensor in part.items())


def test_both_configurations_of_modelopt_name_the_format_and_what_is_kept(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished(*SHORT, "recipe=nvfp4")
    export_quantised(run, tmp_path / "a", "modelopt", measures=quantised.Measures(losses=False))
    inner = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    outer = json.loads((tmp_path / "a" / "hf_quant_config.json").read_text())["quantization"]
    assert (inner["quant_method"], inner["quant_algo"], inner["group_size"]) == (
        "modelopt",
        "NVFP4",
        16,
    )
    assert outer["quant_algo"] == "NVFP4" and outer["exclude_modules"] == inner["ignore"]
    kept = {f"model.layers.1.self_attn.{each}_proj" for each in "qkvo"}
    kept |= {f"model.layers.1.mlp.{each}_proj" for each in ("gate", "up", "down")}
    assert {*inner["ignore"]} == kept | {"lm_head"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("recipe=nvfp4_per_token",), "fprop scales each token of x by its own largest value"),
        pytest.param(
            ("recipe=averis",),
            "fprop quantises x without its mean over tokens",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("recipe=flux_residual",),
            "fprop multiplies the error of the codes of x, too",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("recipe=nvfp4", "recipe.four_over_six=all", "recipe.hadamard=false"),
            "fprop scales each block of x to 6 or to 4",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_export_says_what_serving_software_does_not_do_to_activations(
    finished: FinishedRuns, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    measures = quantised.Measures(losses=False)
    run = finished(*SHORT, *words)
    made = export_quantised(run, tmp_path / "a", "compressed-tensors", measures=measures)
    (note,) = (note for note in made.notes if "Serving software quantises x as it is" in note)
    assert said in note
    plain = finished(*SHORT, "recipe=nvfp4")
    made = export_quantised(plain, tmp_path / "b", "compressed-tensors", measures=measures)
    assert not any("as it is" in note for note in made.notes)


@pytest.mark.long
def test_a_layer_whose_input_is_zero_has_the_scale_that_the_export_states(
    finished: FinishedRuns, cli: Cli, tmp_path: Path
) -> None:
    begun, out = tmp_path / "begun", tmp_path / "codes"
    export_huggingface(finished(*SHORT), begun)
    tensors = load_file(begun / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(tensors, begun / "model.safetensors", {"format": "pt"})
    dead = (f"init={begun}", "recipe=nvfp4", "optim.lr=1e-60", "train.steps=1")
    assert cli("run.name=dead", *dead, *STEADY).code == 0
    measures = quantised.Measures(losses=False)
    made = export_quantised(Path("runs/dead"), out, "modelopt", measures=measures)
    (note,) = (note for note in made.notes if "zero throughout" in note)
    assert "blocks.0.mlp.down" in note and "of 1." in note
    scale = load_file(out / "model.safetensors")["model.layers.0.mlp.down_proj.input_scale"]
    assert float(scale) == pytest.approx(1 / 2688)
    assert verify(out, Path("runs/dead")).equal


def test_a_card_names_transformers_where_it_loads_the_codes(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished(*SHORT, "recipe=nvfp4")
    for layout in ("compressed-tensors", "modelopt"):
        measures = quantised.Measures(losses=False)
        export_quantised(run, tmp_path / layout, layout, measures=measures)
        card = (tmp_path / layout / "README.md").read_text()
        assert ("library_name: transformers" in card) == (layout == "compressed-tensors")


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "to", "said"),
    [
        (
            ("recipe=bf16",),
            "modelopt",
            r"quantised no weight of fprop in its \d steps \(BF16\).*to=hf",
        ),
        (("recipe=fp8_delayed",), "modelopt", "the weight takes its scale from a history"),
        pytest.param(
            ("recipe=tetrajet_v2",),
            "compressed-tensors",
            "the weight is e2m1 in blocks .* under FP32 1×128",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("recipe=tetrajet_v2_outliers", "recipe.outliers.multiple=8"),
            "modelopt",
            "outlier channels are quantised apart",
            marks=pytest.mark.long,
        ),
        (
            ("recipe=fp8_block",),
            "modelopt",
            "ModelOpt's folders have no FP8 128×128.*; to=compressed-tensors has it",
        ),
        pytest.param(
            ("recipe=mxfp4", "recipe.hadamard=false"),
            "modelopt",
            "ModelOpt's folders have no MXFP4",
            marks=pytest.mark.long,
        ),
        (
            ("recipe=nvfp4", "model.width=40"),
            "modelopt",
            "40 in features, which the groups of 16 .* must fill",
        ),
    ],
)
def test_what_no_format_has_is_refused_by_name(
    finished: FinishedRuns,
    command: Command,
    tmp_path: Path,
    words: tuple[str, ...],
    to: str,
    said: str,
) -> None:
    import re

    run = finished("train.steps=2", *words)
    shown = command("export", run, f"to={to}", f"out={tmp_path / 'a'}", code=1)
    assert re.search(said, shown), shown
    assert not (tmp_path / "a").exists() and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("to=modelopt", "stretch=5"),
            "stretch=5: fprop quantised weights in: steps 0–4: NVFP4 (recipe); name a step",
        ),
        (("to=modelopt", "stretch=x"), "stretch='x' must be a whole number"),
        (("to=modelopt", "calibrate=0"), "calibrate=0 must be a whole number from 1"),
        (
            ("to=hf", "stretch=1"),
            "stretch= is for codes, and to=hf writes the weights themselves",
        ),
        (("to=modelop",), "to='modelop' is not one of hf, compressed-tensors, modelopt"),
        (("to=modelopt", "strech=1"), "unknown key 'strech'"),
    ],
)
def test_a_wrong_word_is_named(
    finished: FinishedRuns, command: Command, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    shown = command("export", finished("recipe=nvfp4"), *words, f"out={tmp_path / 'a'}", code=1)
    assert said in shown and not (tmp_path / "a").exists()


def test_a_folder_that_is_there_is_not_written_over(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    shown = command(
        "export", finished("recipe=nvfp4"), "to=modelopt", f"out={tmp_path / 'a'}", code=1
    )
    assert "is there already" in shown and not [*(tmp_path / "a").iterdir()]


def test_layers_in_two_formats_are_refused(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    run = finished("recipe=nvfp4", "+policy.recipe_for_kept={_target_: fp4train.precision.MXFP8}")
    shown = command("export", run, "to=modelopt", f"out={tmp_path / 'a'}", code=1)
    assert "a folder has one format" in shown and "7 layers in NVFP4, 7 layers in MXFP8" in shown
