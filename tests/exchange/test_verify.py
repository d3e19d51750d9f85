"""`fp4train verify` finds whatever of an export is not what the run has, and nothing where all
is.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import FinishedRuns
from hf_exports import Command
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp4train.errors import UserError
from fp4train.exchange import Measures, Verified, export_quantised, verify

Change = Callable[[dict[str, Tensor]], None]

UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def exported(
    finished: FinishedRuns, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """`exported("modelopt")`: (a folder of that layout, which tests copy before they change it; its
    run).
    """
    made: dict[str, Path] = {}

    def folder(layout: str) -> tuple[Path, Path]:
        run = finished("recipe=nvfp4")
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp("exports") / layout
            export_quantised(run, made[layout], layout, measures=Measures(losses=False))
        return made[layout], run

    return folder


def changed(folder: Path, into: Path, change: Change) -> Path:
    shutil.copytree(folder, into)
    tensors = load_file(into / "model.safetensors")
    change(tensors)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return into


def found(result: Verified) -> dict[str, tuple[str, ...]]:
    """Module → what differs."""
    return {each.module: each.differences for each in result.layers if each.differences}


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_an_export_has_the_numbers_of_its_run(
    exported: Callable[[str], tuple[Path, Path]], command: Command, layout: str
) -> None:
    folder, run = exported(layout)
    shown = command("verify", folder, f"against={run}").splitlines()
    assert len(shown) == 14 + 5 + 1 + 1  # linear layers, norms, the embedding, and the sum
    assert sum("NVFP4" in line and line.endswith("  equal") for line in shown[:-1]) == 7
    assert "steps 0–4: NVFP4 (recipe): 20 modules are equal in every bit" in shown[-1]
    as_data = json.loads(command("verify", folder, f"against={run}", "--json"))
    assert as_data["equal"] and as_data["to"] == layout and len(as_data["layers"]) == 20


def flip_a_code(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight"][5, 3] ^= 0x80


def invert_the_global_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_scale_2"] = tensors[f"{UP}.weight_scale_2"].reciprocal()


def swap_two_layers(tensors: dict[str, Tensor]) -> None:
    for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        one = f"{UP}.{part}"
        other = f"model.layers.0.mlp.gate_proj.{part}"
        tensors[one], tensors[other] = tensors[other], tensors[one]


def drop_a_tensor(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{UP}.weight_scale"]


def add_an_ulp(tensors: dict[str, Tensor]) -> None:
    bits = tensors[f"{UP}.weight_scale_2"].view(torch.int32)
    tensors[f"{UP}.weight_scale_2"] = (bits + 1).view(torch.float32)


def change_a_block_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}.weight_scale"].view(torch.uint8)[31, 1] += 1


def change_an_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["model.embed_tokens.weight"].view(torch.int16)[300, 7] += 1


def halve_a_weight(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"][:16].contiguous()


def part_an_input_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.input_scale"] = tensors[f"{UP}.input_scale"] * 2


def spoil_an_input_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{DOWN}.input_scale"] = torch.tensor(0.0)


@pytest.mark.parametrize(
    ("change", "module", "said"),
    [
        (flip_a_code, UP, "1 of 1,024 values of weight differ, from row 5 on"),
        (
            invert_the_global_scale,
            UP,
            "which is its reciprocal: one layout divides by it, the other multiplies",
        ),
        (swap_two_layers, UP, "values of weight differ, from row 0 on"),
        (drop_a_tensor, UP, "weight_scale is missing"),
        (add_an_ulp, UP, "1 ulp apart"),
        (change_a_block_scale, DOWN, "1 of 128 values of weight_scale differ, from row 31 on"),
        (
            change_an_embedding,
            "model.embed_tokens",
            "1 of 10,240 values of weight differ, from row 300 on",
        ),
        (halve_a_weight, DOWN, "weight is torch.uint8 [16, 32] instead of torch.uint8 [32, 32]"),
        (part_an_input_scale, UP, "input_scale differs from that of model.layers.0.mlp.gate_proj"),
        (spoil_an_input_scale, DOWN, "input_scale is 0.0: it must be a finite number above 0"),
    ],
)
def test_a_damaged_folder_is_found_where_it_is_damaged(
    exported: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    change: Change,
    module: str,
    said: str,
) -> None:
    folder, run = exported("modelopt")
    result = verify(changed(folder, tmp_path / "a", change), run)
    assert not result.equal and not result.others
    both = (
        {module, "model.layers.0.mlp.gate_proj"}
        if change in (swap_two_layers, part_an_input_scale)
        else {module}
    )
    assert set(found(result)) == both and said in "; ".join(found(result)[module])


def test_the_exit_code_says_it_and_the_line_of_the_layer(
    exported: Callable[[str], tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fp4train.cli import main

    folder, run = exported("modelopt")
    damaged = changed(folder, tmp_path / "a", add_an_ulp)
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(damaged), f"against={run}", *words])
        shown = capsys.readouterr().out
        assert ended.value.code == 1
        assert "1 ulp apart" in shown and (words or "differs from" in shown.splitlines()[-1])
    assert json.loads(shown)["equal"] is False


def test_a_tensor_that_the_run_has_not_and_other_tables_are_named(
    exported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, run = exported("modelopt")
    more = changed(folder, tmp_path / "a", lambda tensors: tensors.update(more=torch.zeros(3)))
    config = json.loads((more / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["quantization_config"]["ignore"] = []
    (more / "config.json").write_text(json.dumps(config))
    (more / "hf_quant_config.json").unlink()
    others = verify(more, run).others
    assert others[0] == "the run has no more"
    assert "config.json: num_hidden_layers is 3 instead of 2" in others
    assert any(
        each.startswith("config.json: quantization_config.ignore is [] instead of ['lm_head'")
        for each in others
    )
    assert "hf_quant_config.json is missing" in others and len(others) == 4


def test_a_run_directory_is_no_exported_folder(
    exported: Callable[[str], tuple[Path, Path]], command: Command
) -> None:
    folder, run = exported("modelopt")
    said = command("verify", run, f"against={folder}", code=1)
    assert f"{folder} is one, which stands first: fp4train verify {folder} against={run}" in said
    said = command("verify", run, f"against={run}", code=1)
    assert f"{run} is no exported folder: it has no config.json" in said


def set_in(name: str, **values: Any) -> Callable[[Path], object]:
    """Give a table of the folder other values."""

    def change(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(table | values))

    return change


def claim_sparsity(folder: Path) -> None:
    quantised = json.loads((folder / "config.json").read_text())["quantization_config"]
    set_in("config.json", quantization_config=quantised | {"sparsity": 2})(folder)


def swap_two_tokens(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"]["a"], model["vocab"]["b"] = model["vocab"]["b"], model["vocab"]["a"]
    set_in("tokenizer.json", model=model)(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap_two_tokens, "tokenizer.json: model is not that of the run"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (
            set_in("tokenizer_config.json", eos_token="a"),
            "tokenizer_config.json: eos_token is 'a' instead of",
        ),
        (set_in("config.json", eos_token_id=1), "config.json: eos_token_id is 1 instead of 256"),
        (
            set_in("config.json", logit_scale=2),
            "config.json: logit_scale is 2, and the export has none",
        ),
        (claim_sparsity, "config.json: quantization_config.sparsity is 2, and the export has none"),
        (
            set_in("hf_quant_config.json", quantization=[1]),
            "hf_quant_config.json: quantization.quant_algo is None",
        ),
    ],
)
def test_another_tokenizer_or_key_that_changes_what_is_computed_is_named(
    exported: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    change: Callable[[Path], object],
    said: str,
) -> None:
    folder, run = exported("modelopt")
    shutil.copytree(folder, tmp_path / "a")
    change(tmp_path / "a")
    result = verify(tmp_path / "a", run)
    assert not result.equal and not found(result) and result.others[0].startswith(said)


def test_keys_that_change_nothing_that_is_computed_may_be_there(
    exported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, run = exported("modelopt")
    shutil.copytree(folder, tmp_path / "a")
    set_in("config.json", transformers_version="5.0", use_cache=True)(tmp_path / "a")
    assert verify(tmp_path / "a", run).equal


def test_the_codes_of_another_run_are_none_of_this_one(
    exported: Callable[[str], tuple[Path, Path]], finished: FinishedRuns
) -> None:
    folder, _ = exported("modelopt")
    other = finished("recipe=nvfp4", "run.seed=1")
    result = verify(folder, other)
    assert len(found(result)) >= 15


def test_a_run_whose_codes_no_export_writes_is_named_with_the_reason(
    exported: Callable[[str], tuple[Path, Path]], finished: FinishedRuns
) -> None:
    folder, _ = exported("modelopt")
    other = finished("recipe=bf16")
    why = r" has codes that an export of this run does not write: .* quantised no weight of fprop"
    with pytest.raises(UserError, match=re.escape(str(folder)) + why):
        verify(folder, other)


def test_a_folder_of_weights_is_verified_too(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    run = finished("recipe=nvfp4")
    for dtype in ("float32", "bf16"):
        command("export", run, "to=hf", f"out={tmp_path / dtype}", f"dtype={dtype}")
        assert verify(tmp_path / dtype, run).equal
    damaged = changed(
        tmp_path / "float32", tmp_path / "a", lambda tensors: tensors[f"{UP}.weight"][0].neg_()
    )
    assert set(found(verify(damaged, run))) == {UP}


@pytest.mark.long
def test_codes_that_transformers_does_not_load_are_told(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    """Its class of Mamba-2 reads weights before codes of four bits; those of eight it loads."""
    sizes = ("model=hybrid_tiny", "model.width=64", "model.pattern=M", "model.scan.heads=2")
    short = ("train.steps=1", "policy=all", "phases=none")
    said = "transformers does not load codes of four bits of Mamba-2"
    for recipe in ("nvfp4", "mxfp8"):
        run = finished(*sizes, *short, f"recipe={recipe}")
        folder = tmp_path / recipe
        words = ("to=compressed-tensors", f"out={folder}", "losses=false")
        four_bits = recipe == "nvfp4"
        assert (said in command("export", run, *words).replace("\n", " ")) is four_bits


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def rename(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is no whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
        (rename, "quant_method='gptq' is none that fp4train writes (compressed-tensors, modelopt)"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_message(
    exported: Callable[[str], tuple[Path, Path]],
    command: Command,
    tmp_path: Path,
    damage: Callable[[Path], object],
    said: str,
) -> None:
    folder, run = exported("modelopt")
    shutil.copytree(folder, tmp_path / "a")
    damage(tmp_path / "a")
    assert said in command("verify", tmp_path / "a", f"against={run}", code=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "verify needs against=…: fp4train verify FOLDER against=RUN"),
        (("RUN", "against=RUN"), "verify needs one folder: fp4train verify FOLDER against=RUN"),
        (("against=RUN", "stretch=99"), "name a step of one of them"),
        (("against=RUN", "loss=8"), "unknown key 'loss': equal bits are equal weights"),
    ],
)
def test_a_wrong_word_is_named(
    exported: Callable[[str], tuple[Path, Path]],
    command: Command,
    words: tuple[str, ...],
    said: str,
) -> None:
    folder, run = exported("modelopt")
    assert said in command(
        "verify", folder, *(word.replace("RUN", str(run)) for word in words), code=1
    )
