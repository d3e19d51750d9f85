"""A run as a folder of Hugging Face: `transformers` loads it, its weights and its loss are those of
the run.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from finished_runs import FinishedRuns
from hf_exports import FILES, Command, last_evaluation, theirs
from safetensors.torch import load_file
from torch import Tensor

from fp4train import checkpoint
from fp4train.checkpoint.model_folder import INDEX, WEIGHTS
from fp4train.config import to_config
from fp4train.data import Loader
from fp4train.exchange import export_huggingface, open_stored
from fp4train.run.record import directory as run_directory

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


def evaluated(run: Path) -> tuple[Tensor, Tensor]:
    """The tokens and targets of the run's last evaluation."""
    config = to_config(run_directory.read_config(run))
    data = config.data.build(run, config.train.seq_len, config.run.seed)
    size = config.train.batch_size
    length = config.train.seq_len
    return Loader(data.val, batch_size=size, seq_len=length, seed=0).batch(0)


def loss_of(model: Any, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten()).item()


SHAPES = {
    "tied": (),
    "untied, own head width": ("model.tied=false", "model.head_dim=24"),
    "biases": ("model.qkv_bias=true", "model.kv_heads=2"),
    "norms of heads, scaled rotations": (
        "model.qk_norm=true",
        "model.rope_base=500000",
        "+model.rope_scaling._target_=fp4train.models.common.layers.RopeScaling",
        *(
            f"+model.rope_scaling.{each}"
            for each in ("factor=4", "low_freq_factor=1", "high_freq_factor=4")
        ),
        "+model.rope_scaling.original_length=16",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_gives_the_loss_of_the_runs_evaluation(
    finished: FinishedRuns, command: Command, tmp_path: Path, shape: str
) -> None:
    """In float32 both ways, so that what is compared is the model, and not how each side rounds."""
    run = finished("recipe=fp32", "train.steps=3", *SHAPES[shape])
    out = tmp_path / "out"
    told = command("export", run, "to=hf", f"out={out}")
    assert f"{out}: step 3, " in told and "weights in float32" in told
    assert set(os.listdir(out)) == FILES | TOKENIZER
    model = theirs(out)
    assert loss_of(model, *evaluated(run)) == pytest.approx(
        last_evaluation(run)["val/loss"], abs=1e-5
    )
    assert model.config.vocab_size == 320 and model.dtype == torch.float32
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, 256)
    stored = open_stored(run)
    own = {part.name: stored.saved.tensors[name] for name, part in stored.parts.items()}
    back = model.state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in own.items()), "every bit"
    assert set(back) - set(own) <= {"lm_head.weight"}, "that is the embedding's where it is tied"


def test_the_default_recipe_is_exported_with_its_float32_weights(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    command("export", small_run, "to=hf", f"out={tmp_path / 'out'}")
    x, y = evaluated(small_run)
    config = to_config(run_directory.read_config(small_run))
    found = checkpoint.load(small_run / "checkpoints")
    ours = config.model.build(vocab_size=257, seq_len=32)
    ours.load_state_dict(
        {
            n.removeprefix("model/"): found.tensors[n]
            for n in found.tensors
            if n.startswith("model/")
        }
    )
    with torch.no_grad():
        expected = ours(x, y).item()
    loss = loss_of(theirs(tmp_path / "out"), x, y)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert loss == pytest.approx(last_evaluation(small_run)["val/loss"], abs=2e-2), (
        "which was computed in BF16"
    )


def test_bf16_is_the_nearest_of_each_weight_and_shards_have_an_index(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    out = tmp_path / "deep/er/out"
    command("export", small_run, "to=hf", f"out={whole}")
    told = command("export", small_run, "to=hf", f"out={out}", "dtype=bf16", "shard=20kB", "step=6")
    assert "0.1 MB of weights in bf16" in told
    index = json.loads((out / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    expected = load_file(whole / WEIGHTS)
    held = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert set(held) == set(expected) and all(
        torch.equal(held[n], t.bfloat16()) for n, t in expected.items()
    )
    assert theirs(out).dtype == torch.bfloat16
    assert (
        "rounded to nearest, ties to even, from the float32 weights"
        in (out / "README.md").read_text()
    )


def test_moments_are_neither_read_nor_missed(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    export_huggingface(run, tmp_path / "first")
    (run / "checkpoints/step_00000006/tensors.safetensors").unlink()
    export_huggingface(run, tmp_path / "second")
    assert same_files(tmp_path / "first", tmp_path / "second")


def same_files(one: Path, other: Path) -> bool:
    names = sorted(os.listdir(one))
    return names == sorted(os.listdir(other)) and all(
        (one / n).read_bytes() == (other / n).read_bytes() for n in names
    )


def missing(path: Path) -> None:
    path.unlink()


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"), [(missing, "is missing"), (flipped, "is damaged (checksum differs)")]
)
def test_damaged_weights_are_refused_and_other_steps_are_named(
    finished: FinishedRuns,
    command: Command,
    tmp_path: Path,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    run = Path(shutil.copytree(finished("train.steps=4", "checkpoint.every=2"), tmp_path / "b"))
    damage(run / "checkpoints/step_00000004/weights.safetensors")
    for words in ((), ("step=4",)):
        told = command("export", run, "to=hf", f"out={tmp_path / 'out'}", *words, code=1)
        assert f"weights.safetensors {said}" in told and "Others in the folder: 2" in told
        assert ("step=2 takes the one before" in told) == (not words) and "no usable" not in told
    assert os.listdir(tmp_path) == ["b"]
    assert "step 2, " in command("export", run, "to=hf", f"out={tmp_path / 'out'}", "step=2")


def test_weights_that_are_not_the_models_are_named(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    found = checkpoint.load(run / "checkpoints")
    tensors = {
        name: tensor for name, tensor in found.tensors.items() if name != "model/norm.weight"
    }
    checkpoint.save(run / "checkpoints", 6, tensors, found.state, keep=1)
    said = command("export", run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "step_00000006 lacks norm.weight" in said and os.listdir(tmp_path) == ["b"]
