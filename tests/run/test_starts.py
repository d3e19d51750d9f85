"""Each start composes its configuration once and binds it once, whatever verb it is; each point of a
sweep does.
"""

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from command_line import Cli
from hydra import compose
from hydra._internal.hydra import Hydra

from fp4train.config import Config, composition, schema


class Start(NamedTuple):
    """A command, and how often it composes a configuration and binds one."""

    composed: int
    bound: int
    words: tuple[str, ...]
    long: bool = False


WHOLE = {"runs/a"}
"""Words of commands that are not given the options of a tiny run."""
STARTS = {
    "a run": Start(1, 1, ("run.name=c", "train.steps=1")),
    "a run from another": Start(1, 1, ("run.name=c", "init=runs/a", "train.steps=1")),
    "a plan": Start(1, 1, ("plan", "recipe=nvfp4", "data/tokenizer=bytes")),
    "a plan of a resume": Start(1, 1, ("plan", "resume=runs/a", "train.steps=4")),
    "a plan of a run": Start(0, 0, ("plan", "runs/a")),
    "a resume": Start(1, 1, ("resume=runs/a", "train.steps=2")),
    "a branch with another recipe": Start(
        1, 1, ("resume=runs/a", "recipe=bf16", "train.steps=2", "run.name=b")
    ),
    "a swap": Start(1, 1, ("swap", "runs/a", "recipe=bf16", "wait=0")),
    "a report": Start(0, 0, ("report", "runs/a")),
    "an export": Start(0, 1, ("export", "runs/a", "to=hf", "out=exported")),
    "an evaluation in two recipes": Start(
        1, 1, ("eval", "runs/a", "recipe=bf16,nvfp4", "batches=1")
    ),
    "a sweep": Start(
        4, 4, ("-m", "recipe=bf16,nvfp4", "optim.lr=1e-3,3e-3", "train.steps=1"), long=True
    ),
}


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Hydra was asked to compose."""
    found: list[Any] = []
    original = Hydra.compose_config

    def compose_config(self: Hydra, *arguments: Any, **options: Any) -> Any:
        found.append((arguments, options))
        return original(self, *arguments, **options)

    monkeypatch.setattr(Hydra, "compose_config", compose_config)
    monkeypatch.setattr(composition, "hydra_compose", compose)  # the tests' own remembers
    return found


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The whole configurations that were bound."""
    found: list[Any] = []
    original = schema.bind

    def bind(node: Any, hint: Any, path: str) -> Any:
        found.extend([node] * (hint is Config))
        return original(node, hint, path)

    monkeypatch.setattr(schema, "bind", bind)
    return found


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(each, id=name, marks=[pytest.mark.long] * each.long)
        for name, each in STARTS.items()
    ],
)
def test_a_start_composes_once_and_binds_once(
    cli: Cli,
    composed: list[Any],
    bound: list[Any],
    start: Start,
) -> None:
    cli.trained("run.name=a", "train.steps=1")
    composed.clear()
    bound.clear()
    ended = cli.raw(*start.words) if WHOLE & set(start.words) else cli(*start.words)
    assert ended.code == 0, ended.err or ended.out
    assert (len(composed), len(bound)) == (start.composed, start.bound)


@pytest.mark.long
def test_a_plan_loads_neither_what_divides_runs_nor_the_compiler() -> None:
    """They would take as long as all the rest of it."""
    heavy = (
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "sympy",
        "matplotlib",
        "triton",
    )
    code = (
        "import sys; from fp4train.cli import main\ntry: main(['plan'])\nexcept SystemExit: "
        "print(sorted(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert [name for name in heavy if f"'{name}'" in shown] == [] and "'torch'" in shown
