"""Runs that were exported to folders of Hugging Face, as tests read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command_line import lines
from families import folder_names
from torch import Tensor

from fp4train import checkpoint
from fp4train.checkpoint.model_folder import WEIGHTS
from fp4train.config import to_config
from fp4train.run.record import directory as run_directory

Command = Callable[..., str]
FP8_BLOCKS = (
    "model.width=256",
    "model.hidden=256",
    "model.layers=2",
    "model.head_dim=128",
    "model.kv_heads=1",
)
"""Sizes whose blocks of 128×128 are full."""
FILES = {"README.md", "config.json", "fp4train.json", "generation_config.json", WEIGHTS}


def last_evaluation(run: Path) -> dict[str, Any]:
    """The line of metrics of a run's last evaluation."""
    return [line for line in lines(run) if "val/loss" in line][-1]


def theirs(folder: Path) -> Any:
    """The model of an exported folder, in transformers."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def used(folder: Path) -> dict[str, Any]:
    """What the Python of a folder's card defines."""
    python = (folder / "README.md").read_text().split("```python\n")[1].partition("```")[0]
    names: dict[str, Any] = {}
    exec(python.replace("FOLDER", str(folder)), names)
    del names["__builtins__"]
    return names


FUSED = (("attention.wq", "attention.wk", "attention.wv"), ("mlp.gate", "mlp.up"))
SHORT = ("train.steps=4",)
"""A run of four steps."""


def weights(run: Path) -> dict[str, Tensor]:
    """Layer → its weight, of the newest checkpoint."""
    found = checkpoint.load(run / run_directory.CHECKPOINTS).tensors
    return {
        name.removeprefix("model/").removesuffix(".weight"): found[name]
        for name in found
        if name.startswith("model/")
    }


def amaxes(found: dict[str, Tensor], block: int = 0) -> dict[str, Tensor]:
    """Layer of a block → the amax that serving software has for it."""
    made = {}
    for group in (*FUSED, ("attention.wo",), ("mlp.down",)):
        largest = torch.stack(
            [found[f"blocks.{block}.{name}"].abs().amax() for name in group]
        ).amax()
        made |= {f"blocks.{block}.{name}": largest for name in group}
    return made


def module_of(run: Path, layer: str) -> str:
    config = to_config(run_directory.read_config(run))
    return str(folder_names(config.model)[f"{layer}.weight"]).removesuffix(".weight")
