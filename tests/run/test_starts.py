"""Each start composes its configuration once, whatever verb it is; each point of a sweep does."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from hydra import compose
from hydra._internal.hydra import Hydra

from fp4train.config import composition

COUNTED: dict[str, tuple[int, tuple[str, ...]]] = {
    "a run": (1, ("run.name=a", "train.steps=1")),
    "a key that only the class has": (1, ("plan", "recipe=mxfp8", "recipe.two_d_weights=true")),
    "a plan": (1, ("plan", "recipe=nvfp4", "data/tokenizer=bytes")),
    "a plan of a mesh": (1, ("plan", "gpu=B200", "gpus=8", "train.batch_size=8")),
    "a resume": (1, ("resume=runs/a", "train.steps=2")),
    "a branch with another recipe": (1, ("resume=runs/a", "recipe=bf16", "train.steps=2", "run.name=b")),
    "a plan of a resume": (1, ("plan", "resume=runs/a", "train.steps=4")),
    "a swap": (1, ("swap", "runs/a", "recipe=bf16", "wait=0")),
    "a study": (1, ("sensitivity", "runs/a", "recipe=nvfp4", "batches=1", "repeats=1")),
    "a ranking": (1, ("rank", "runs/a", "recipe=bf16,nvfp4", "policy=last15,all", "forks=1", "steps=1", "batches=1")),
    "an export": (0, ("export", "runs/a", "to=hf", "out=exported")),
    "text from a run": (0, ("sample", "runs/a", "tokens=1", "prompt=a")),
    "text from a folder": (1, ("sample", "exported", "tokens=1", "prompt=a")),
    "an evaluation": (0, ("eval", "runs/a", "batches=1")),
    "a sweep": (4, ("-m", "recipe=bf16,nvfp4", "optim.lr=1e-3,3e-3", "train.steps=1")),
    "a sweep that a file asks for": (1 + 5, ("-m", "experiment=nvfp4_ablations", "train.steps=1")),
    "help": (1, ("plan", "--help")),
    "the state of the machine": (1, ("doctor", "--json")),
}


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Hydra was asked to compose."""
    found: list[Any] = []
    original = Hydra.compose_config

    def compose_config(self: Hydra, *arguments: Any, **options: Any) -> Any:
        found.append((arguments, options))
        return original(self, *arguments, **options)

    monkeypatch.setattr(Hydra, "compose_config", compose_config)
    monkeypatch.setattr(composition, "hydra_compose", compose)  # the tests' own remembers
    return found


@pytest.mark.long
def test_a_start_composes_once(cli: Cli, compositions: list[Any]) -> None:
    wrong = {}
    for name, (count, arguments) in COUNTED.items():
        compositions.clear()
        raw = (
            arguments[0] in ("swap", "sensitivity", "rank", "export", "sample", "eval", "doctor")
            or "--help" in arguments
        )
        ended = cli.raw(*arguments) if raw else cli(*arguments)
        if (len(compositions), ended.code) != (count, 0):
            wrong[name] = (len(compositions), ended.err or ended.out)
    assert not wrong
    assert {p.name for p in Path("runs").glob("ablations-*")} >= {"ablations-bf16-paper", "ablations-nvfp4-paper"}


def test_a_plan_loads_neither_what_divides_runs_nor_the_compiler() -> None:
    """They would take as long as all the rest of it."""
    heavy = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy", "matplotlib")
    code = (
        "import sys; from fp4train.cli import main\ntry: main(['plan'])\nexcept SystemExit: print(sorted(sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [name for name in heavy if f"'{name}'" in shown] == [] and "'torch'" in shown
