"""Runs that were exported to folders of Hugging Face, as tests read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_line import lines

from fp4train.checkpoint.model_folder import WEIGHTS

Train = Callable[..., Path]
Command = Callable[..., str]
FP8_BLOCKS = ("model.width=160", "model.hidden=256", "model.layers=2", "model.head_dim=128", "model.kv_heads=1")
"""Sizes whose blocks of 128 rows are full in all but the last of the layers that servers multiply as one."""
FILES = {"README.md", "config.json", "generation_config.json", WEIGHTS}


def last_evaluation(run: Path) -> dict[str, Any]:
    """The line of metrics of a run's last evaluation."""
    return [line for line in lines(run) if "val/loss" in line][-1]


def theirs(folder: Path) -> Any:
    """The model of an exported folder, in transformers."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
