"""A model that cannot fit is refused before it is built; one that takes long to build says how far
it is.
"""

import re
from pathlib import Path

import pytest
from command_line import Cli
from pretended import Machine

GRADED = """
from dataclasses import dataclass

import torch

from fp4train.models.llama import Llama


@dataclass(frozen=True, kw_only=True)
class Graded(Llama):
    def build(self, *, vocab_size, seq_len):
        assert torch.linspace(0, 1, self.layers).tolist()[0] == 0
        return super().build(vocab_size=vocab_size, seq_len=seq_len)
"""
"""A model with a number per block that is read from a tensor, which the meta device cannot do."""


def test_weights_beyond_the_main_memory_are_refused_with_the_numbers(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch).has_main_memory(25_300_000_000)
    wide = (
        "model.layers=16",
        "model.width=16384",
        "model.heads=128",
        "model.kv_heads=128",
        "model.hidden=65536",
    )
    said = cli("run.name=a", *wide).message
    needed = (
        r"LlamaModel has 68\.7 B parameters.* 275 GB of float32, and this machine has 25\.3 "
        r"GB\. Choose"
    )
    assert re.search(needed, said) and not Path("runs/a/config.yaml").exists()


def test_a_model_that_reads_values_while_it_is_built_is_trained_though_its_size_is_not_known_before(
    cli: Cli,
) -> None:
    folder = Path("mine")
    folder.mkdir()
    (folder / "graded.py").write_text(GRADED)
    (folder / "model").mkdir()
    (folder / "model" / "graded.yaml").write_text("_target_: graded.Graded\n")
    assert (
        cli(
            "run.name=a",
            "--config-dir",
            "mine",
            "plugins=[graded]",
            "model=graded",
            "train.steps=1",
        ).code
        == 0
    )
