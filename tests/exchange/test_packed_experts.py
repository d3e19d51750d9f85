"""Mixtures of experts as folders of codes: a matrix per expert, with names and scales that serving
software reads.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from finished_runs import FinishedRuns
from hf_exports import Command
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp4train import checkpoint
from fp4train.config import to_config
from fp4train.exchange import Measures, export_quantised, verify
from fp4train.quantize import QuantSpec, quantize
from fp4train.run.record import directory as run_directory

EXPERTS = 4
HIDDEN = 32
SIZES = (
    "model=moe_tiny",
    "model.width=32",
    f"model.experts.count={EXPERTS}",
    f"model.experts.hidden={HIDDEN}",
)
DOTS = (
    *SIZES,
    "model.layers=3",
    "model.hidden=64",
    "train.steps=1",
    "train.batch_size=2",
    "phases=none",
)
"""Block 0 has an MLP, block 1 experts and a shared one, and block 2 is kept in high precision."""
MIXTRAL = (
    *SIZES,
    "model.layers=2",
    "model.dense=0",
    "model.qk_norm=false",
    "model.experts.shared=0",
    "model.balance.speed=0",
    "model.experts.scores=softmax",
    "model.experts.bias=false",
    "train.steps=1",
    "train.batch_size=2",
    "phases=none",
)
UNMEASURED = Measures(losses=False)
INSIDE = "model.layers.1.mlp.experts"
NO_LINEAR = ("re:.*norm", "model.embed_tokens")
"""Modules whose weights that conversion would take for those of linear layers, since it sees no
model.
"""


def fprop_weight(run: Path) -> QuantSpec:
    spec = to_config(run_directory.read_config(run)).recipe.table()["fprop"].second
    assert spec is not None
    return spec


def stored(run: Path, name: str) -> Tensor:
    return checkpoint.load(run / run_directory.CHECKPOINTS).tensors[f"model/{name}.weight"]


def decoded(run: Path, block: int) -> dict[str, Tensor]:
    """Projection of an expert, "3.up" → what training multiplied: each expert's gate and up are one
    weight.
    """
    spec = fprop_weight(run)
    found = {}
    gate_up, down = (stored(run, f"blocks.{block}.mlp.{each}") for each in ("gate_up", "down"))
    for expert in range(EXPERTS):
        gate, up = quantize(gate_up[expert], spec).dequantize().bfloat16().chunk(2)
        found |= {f"{expert}.gate": gate, f"{expert}.up": up}
        found[f"{expert}.down"] = quantize(down[expert], spec).dequantize().bfloat16()
    return found


def dequantised(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder as compressed-tensors converts them, which refuses a matrix that
    lacks a scale.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer

        converter = CompressedTensorsDequantizer(folder, ignore=NO_LINEAR)
        found: dict[str, Tensor] = converter.process(load_file(folder / "model.safetensors"))
    return found


@pytest.fixture(scope="module")
def exported(
    finished: FinishedRuns, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """`exported("modelopt", *words)`: (a folder of that layout, which tests copy before they change
    it; its run).
    """
    made: dict[tuple[str, ...], Path] = {}

    def folder(layout: str, *words: str) -> tuple[Path, Path]:
        run = finished(*(words or (*DOTS, "recipe=nvfp4")))
        if (layout, *words) not in made:
            made[layout, *words] = tmp_path_factory.mktemp("exports") / "a"
            export_quantised(run, made[layout, *words], layout, measures=UNMEASURED)
        return made[layout, *words], run

    return folder


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_row"])
def test_compressed_tensors_dequantises_every_expert_to_our_bits(
    finished: FinishedRuns, exported: Callable[..., tuple[Path, Path]], recipe: str
) -> None:
    folder, run = exported("compressed-tensors", *DOTS, f"recipe={recipe}")
    assert verify(folder, run).equal
    theirs = dequantised(folder)
    for name, wanted in decoded(run, 1).items():
        assert torch.equal(theirs[f"{INSIDE}.{name}_proj.weight"], wanted), name
    kept = stored(run, "blocks.2.mlp.gate_up")
    assert torch.equal(
        theirs["model.layers.2.mlp.experts.3.up_proj.weight"], kept[3, HIDDEN:].bfloat16()
    )
    assert torch.equal(
        theirs["model.layers.1.mlp.gate.weight"], stored(run, "blocks.1.mlp.router").bfloat16()
    )


@pytest.mark.long
def test_the_biases_that_routers_choose_by_keep_every_bit(
    exported: Callable[..., tuple[Path, Path]],
) -> None:
    """They move by steps that BF16 would round away."""
    folder, run = exported("compressed-tensors")
    found = load_file(folder / "model.safetensors")[
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]
    own = checkpoint.load(run / run_directory.CHECKPOINTS).tensors["model/blocks.1.mlp.router.bias"]
    assert (
        found.dtype == torch.float32
        and torch.equal(found, own)
        and not torch.equal(own.bfloat16().float(), own)
    )
    forms = {each.name: each.form for each in verify(folder, run).layers}
    assert (forms["blocks.1.mlp.router.bias"], forms["blocks.1.mlp.router"]) == (
        "float32",
        "bfloat16",
    )


def test_transformers_has_those_experts_once_compressed_tensors_has_converted_the_folder(
    exported: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """It joins them, gate above up. It has no way of its own to load NVFP4 for experts."""
    folder, run = exported("compressed-tensors")
    shutil.copytree(folder, tmp_path / "a")
    tensors = {
        k: v for k, v in dequantised(folder).items() if not k.endswith(".input_global_scale")
    }
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "a", dtype=torch.bfloat16
        )
    experts = model.model.layers[1].mlp.experts
    wanted = decoded(run, 1)
    for expert in range(EXPERTS):
        both = torch.cat([wanted[f"{expert}.gate"], wanted[f"{expert}.up"]])
        assert torch.equal(experts.gate_up_proj[expert], both)
        assert torch.equal(experts.down_proj[expert], wanted[f"{expert}.down"])


@pytest.mark.long
def test_modelopts_own_quantiser_gives_the_same_bytes(
    exported: Callable[..., tuple[Path, Path]], modelopt: ModuleType
) -> None:
    """Of each expert, with one scale for its gate and up: codes, block scales, and weight_scale_2
    to the last bit.
    """
    folder, run = exported("modelopt", *DOTS, "recipe=nvfp4_1d_weights")
    found = load_file(folder / "model.safetensors")
    theirs = modelopt.NVFP4QTensor
    gate_up, down = (stored(run, f"blocks.1.mlp.{each}") for each in ("gate_up", "down"))
    seen = set()
    for expert in range(EXPERTS):
        weights = {
            "gate": gate_up[expert, :HIDDEN],
            "up": gate_up[expert, HIDDEN:],
            "down": down[expert],
        }
        for name, own in weights.items():
            amax = float((down if name == "down" else gate_up)[expert].abs().amax())
            double = theirs.get_weights_scaling_factor_2(torch.full((1, 16), amax))
            codes, scales, _ = theirs.quantize(own.clone(), 16, None, double)
            module = f"{INSIDE}.{expert}.{name}_proj"
            assert torch.equal(found[f"{module}.weight"], codes._quantized_data), module
            assert torch.equal(
                found[f"{module}.weight_scale"].view(torch.uint8), scales.view(torch.uint8)
            ), module
            assert torch.equal(found[f"{module}.weight_scale_2"], double.reshape(())), module
            seen.add(amax)
    assert len(seen) == 2 * EXPERTS  # an expert has scales of its own
    for names in (("gate", "up"), ("down",)):
        scales = {
            float(found[f"{INSIDE}.{expert}.{n}_proj.input_scale"])
            for expert in range(EXPERTS)
            for n in names
        }
        assert len(scales) == 1


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_routers_and_experts_in_high_precision_are_listed_by_the_names_that_vllm_looks_for(
    exported: Callable[..., tuple[Path, Path]], layout: str
) -> None:
    """It asks for experts of Mixtral as `gate_proj`, and the folder says `w1`. Of ModelOpt's
    folders SGLang and TensorRT-LLM ask for the module that holds them.
    """
    folder, _ = exported(layout, *MIXTRAL, "recipe=nvfp4")
    ignored = set(json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"])
    wanted = {f"model.layers.{block}.block_sparse_moe.gate" for block in (0, 1)}
    wanted |= {f"model.layers.1.self_attn.{each}_proj" for each in "qkvo"} | {"lm_head"}
    for name in ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"):
        wanted |= {
            f"model.layers.1.block_sparse_moe.experts.{expert}.{name}" for expert in range(EXPERTS)
        }
    if layout == "modelopt":
        wanted.add("model.layers.1.block_sparse_moe.experts")
    assert ignored == wanted
    names = {name.rpartition(".")[0] for name in load_file(folder / "model.safetensors")}
    assert {
        f"model.layers.0.block_sparse_moe.experts.{EXPERTS - 1}.{each}"
        for each in ("w1", "w2", "w3")
    } < names


@pytest.mark.long
def test_gate_and_up_of_an_expert_are_not_quantised_again(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    """They were one weight in training; the layers of attention and the shared expert were not."""
    run = finished(*DOTS, "recipe=nvfp4", "eval.errors_every=1")
    shown = command("export", run, "to=modelopt", f"out={tmp_path / 'a'}", "losses=false")
    (again,) = re.findall(r"(\d+) of 26 weights are quantised again", shown)
    assert (
        0 < int(again) <= 4 * 2 + 2
    )  # of 2 blocks q, k, v, and of an MLP and a shared expert gate and up, but for one
    # measured were those of the busiest expert
    assert "The activations' scales are of 4 batches" in shown
    assert verify(tmp_path / "a", run).equal


@pytest.mark.parametrize(
    "words",
    [(), pytest.param((*DOTS, "recipe=nvfp4", "policy.last=2"), marks=pytest.mark.long)],
)
def test_transformers_loads_no_codes_of_a_model_with_experts(
    exported: Callable[..., tuple[Path, Path]], words: tuple[str, ...]
) -> None:
    folder, _ = exported("compressed-tensors", *words)
    assert "library_name" not in (folder / "README.md").read_text()


def flip_a_code(tensors: dict[str, Tensor]) -> None:
    tensors[f"{INSIDE}.2.up_proj.weight"][5, 3] ^= 0x80


def take_the_scale_of_another_expert(tensors: dict[str, Tensor]) -> None:
    name = f"{INSIDE}.{{}}.down_proj.weight_scale_2"
    tensors[name.format(1)] = tensors[name.format(2)].clone()


def part_an_input_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{INSIDE}.1.down_proj.input_scale"] = tensors[f"{INSIDE}.1.down_proj.input_scale"] * 2


@pytest.mark.parametrize(
    ("change", "modules", "said"),
    [
        (flip_a_code, {"2.up"}, "1 of 512 values of weight differ, from row 5 on"),
        (take_the_scale_of_another_expert, {"1.down"}, "weight_scale_2 is "),
        (part_an_input_scale, {"1.down", "2.down"}, "which is multiplied with it"),
    ],
)
def test_a_damaged_expert_is_found(
    exported: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None],
    modules: set[str],
    said: str,
) -> None:
    folder, run = exported("modelopt")
    shutil.copytree(folder, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    result = verify(tmp_path / "a", run)
    found = {each.module: each.differences for each in result.layers if each.differences}
    assert set(found) == {f"{INSIDE}.{each}_proj" for each in modules} and not result.others
    assert all(said in "; ".join(each) for each in found.values())


@pytest.mark.parametrize(
    ("words", "to", "said"),
    [
        (
            ("recipe=fp8_row",),
            "modelopt",
            "ModelOpt's folders have no FP8 rows for experts; to=compressed-tensors has",
        ),
        (
            ("recipe=nvfp4", "model.experts.hidden=24"),
            "compressed-tensors",
            "experts whose gate and up have 24 rows each, and blocks of 16 rows, some of "
            "which hold both",
        ),
        (
            ("recipe=nvfp4_1d_weights", "model.experts.hidden=24"),
            "modelopt",
            "24 in features, which the groups of 16",
        ),
    ],
)
def test_what_no_format_has_of_experts_is_refused_by_name(
    finished: FinishedRuns,
    command: Command,
    tmp_path: Path,
    words: tuple[str, ...],
    to: str,
    said: str,
) -> None:
    given = {word.partition("=")[0] for word in words}
    run = finished(*(word for word in DOTS if word.partition("=")[0] not in given), *words)
    shown = command("export", run, f"to={to}", f"out={tmp_path / 'a'}", code=1)
    assert said in shown and not (tmp_path / "a").exists()


@pytest.mark.long
def test_a_plan_that_divides_the_experts_of_a_layer_is_said(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished(*DOTS, "recipe=nvfp4", "policy.keep=[mlp.down]")
    made = export_quantised(run, tmp_path / "a", "compressed-tensors", measures=UNMEASURED)
    (note,) = (each for each in made.notes if "may refuse the folder" in each)
    assert "some of blocks.1.mlp.gate_up, blocks.1.mlp.down in high precision" in note
    export_quantised(run, tmp_path / "b", "modelopt", measures=UNMEASURED)
    excluded = json.loads((tmp_path / "b/hf_quant_config.json").read_text())["quantization"][
        "exclude_modules"
    ]
    packed = {
        name.rpartition(".experts.")[0]
        for name in load_file(tmp_path / "b/model.safetensors")
        if "_scale" in name
    }
    assert not any(f"{module}.experts" in excluded for module in packed - {""})
    assert verify(tmp_path / "a", run).equal
