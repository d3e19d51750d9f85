"""From a run to a Hugging Face folder and back into a run: every weight in every bit, and the same
folder again.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from finished_runs import FinishedRuns
from hf_exports import Command
from safetensors.torch import load_file
from torch import Tensor

from fp4train import checkpoint

STILL = (
    "optim.lr=1e-30",
    "train.steps=1",
    "schedule=constant",
    "schedule.warmup=0",
    "phases=none",
    "recipe=fp32",
)
"""A rate so small that no weight changes."""
SCALED = "model.rope_scaling={factor:4,low_freq_factor:1,high_freq_factor:4,original_length:16}"


def weights(run: Path) -> dict[str, Tensor]:
    found = checkpoint.load(run / "checkpoints").tensors
    return {name: found[name] for name in found if name.startswith("model/")}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        (),
        ("model.tied=false", "model.head_dim=24"),
        ("model.qkv_bias=true", "model.kv_heads=2"),
        ("model.qk_norm=true", "model.rope_base=500000", SCALED),
    ],
    ids=["tied", "untied, own head width", "biases", "norms of heads, scaled rotations"],
)
def test_a_run_comes_back_in_every_bit(
    finished: FinishedRuns, command: Command, tmp_path: Path, shape: tuple[str, ...]
) -> None:
    run = finished(*shape)
    folder = tmp_path / "hf"
    again = tmp_path / "again"
    command("export", run, "to=hf", f"out={folder}")
    back = finished(*shape, f"init={folder}", *STILL)
    assert equal(weights(back), weights(run))
    command("export", back, "to=hf", f"out={again}")
    assert equal(load_file(again / "model.safetensors"), load_file(folder / "model.safetensors"))
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, again)]
    assert configs[0] == configs[1]


def test_a_folder_of_transformers_comes_back_in_every_bit(
    finished: FinishedRuns, command: Command, tmp_path: Path, folders: dict[str, Path]
) -> None:
    """With the token ids of its tokenizer, which the folder keeps, and its chat template, though no
    run had chat.
    """
    import transformers

    shape = ("model.width=64", "model.heads=4", "model.kv_heads=2", "model.hidden=96")
    for name in ("llama-3", "qwen3"):
        theirs = Path(shutil.copytree(folders[name], tmp_path / f"{name}-chat"))
        (theirs / "chat_template.jinja").write_text(
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}\n"
        )
        run = finished(*shape, f"init={theirs}", *STILL)
        command("export", run, "to=hf", f"out={tmp_path / name}")
        load = transformers.AutoModelForCausalLM.from_pretrained
        one = load(theirs)
        other = load(tmp_path / name)
        assert type(one) is type(other) and equal(one.state_dict(), other.state_dict())
        texts = [
            transformers.AutoTokenizer.from_pretrained(each) for each in (theirs, tmp_path / name)
        ]
        said: list[Any] = [each("def é漢🙂 add(\r\n")["input_ids"] for each in texts]
        assert said[0] == said[1]
        talk = [{"role": "user", "content": "2+2?"}]
        assert {each.apply_chat_template(talk, tokenize=False) for each in texts} == {"[user]2+2?"}
