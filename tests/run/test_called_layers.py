"""The guard of the first step in runs: a model of another package whose code multiplies a planned
weight itself.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Cli

LAB = '''
from dataclasses import dataclass

import torch.nn.functional as F

from fp4train.models.llama import Llama

def fused(self, x):
    return F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight.to(x.dtype))

@dataclass(frozen=True, kw_only=True)
class Model(Llama):
    """A Llama whose MLP multiplies down.weight itself."""
    def build(self, *, vocab_size, seq_len):
        model = super().build(vocab_size=vocab_size, seq_len=seq_len)
        for block in model.blocks:
            kind = type(block.mlp)
            block.mlp.__class__ = type("Fused", (kind,), {"forward": fused})
        return model
'''
OWN = ("--config-dir", "mine", "plugins=[fusedlab]", "model=fused", "policy=all")


@pytest.fixture(autouse=True)
def mine(cli: Cli) -> Iterator[None]:
    model = "_target_: fusedlab.Model\nwidth: 32\nlayers: 2\nheads: 2\nkv_heads: 1\nhidden: 64\n"
    for path, text in {"fusedlab.py": LAB, "model/fused.yaml": model}.items():
        (Path("mine") / path).parent.mkdir(parents=True, exist_ok=True)
        (Path("mine") / path).write_text(text)
    yield
    sys.modules.pop("fusedlab", None)


def test_a_weight_that_the_model_multiplies_itself_ends_the_run_in_its_first_step(cli: Cli) -> None:
    ended = cli(*OWN, "run.name=a", "train.steps=3")
    assert ended.code == 1
    assert (
        "blocks.0.mlp.down, blocks.1.mlp.down: planned in NVFP4 and not called in the first step"
        in ended.err
    )
    assert "policy.keep=[mlp.down]" in ended.err


def test_the_fix_that_the_error_names_trains(cli: Cli) -> None:
    ended = cli(*OWN, "run.name=a", "train.steps=2", "policy.keep=[mlp.down]")
    assert ended.code == 0 and "in the first step" not in ended.err


@pytest.mark.parametrize(
    "options",
    [
        ("model.recompute=true",),
        ("model.tied=true", "eval.every=1"),
        ("eval.errors_every=1",),
        ("train.microbatch=2",),
    ],
)
def test_a_run_whose_layers_are_all_called_says_nothing(cli: Cli, options: tuple[str, ...]) -> None:
    ended = cli("run.name=a", "train.steps=2", "policy=all", *options)
    assert ended.code == 0 and "in the first step" not in ended.err
