"""Each start composes its configuration once, binds it once and explains its plan once, whatever
verb it is; each point of a sweep does. Runs and plans read a saved configuration once, too, and
write their plan once.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import Cli
from hydra import compose
from hydra._internal.hydra import Hydra

from fp4train.cli import plan, train
from fp4train.config import Config, composition, folders, schema
from fp4train.precision import report
from fp4train.run import origin
from fp4train.run.record import directory, journal, stretches


class Start(NamedTuple):
    """A command, and how often it composes a configuration, binds one, and explains a plan."""

    composed: int
    bound: int
    explained: int
    words: tuple[str, ...]
    before: tuple[str, ...] = ()
    """A command that makes what it needs, beside the run `a`."""
    made: tuple[str, ...] = ()
    """Folders that it makes."""
    long: bool = False


EXPORT = ("export", "runs/a", "to=hf", "out=exported")
INIT = (
    "run.name=b",
    "init=exported",
    "train.steps=1",
    "train.batch_size=2",
    "train.seq_len=16",
    "eval.batches=1",
)
WHOLE = {"runs/a", "exported", "init=exported", "doctor", "help"}
"""Words of commands that are not given the options of a tiny run."""
ABLATIONS = ("runs/ablations-bf16-paper", "runs/ablations-nvfp4-paper")
STARTS = {
    "a run": Start(1, 1, 1, ("run.name=c", "train.steps=1")),
    "a run from a folder": Start(
        1,
        1,
        1,
        (*INIT, "track=jsonl", "data=text", "data.path=text.txt", "data.cache_dir=cache"),
        EXPORT,
    ),
    "a run from another": Start(1, 1, 1, ("run.name=c", "init=runs/a", "train.steps=1")),
    "a key that only the class has": Start(
        1, 1, 1, ("plan", "recipe=mxfp8", "recipe.two_d_weights=true")
    ),
    "a plan": Start(1, 1, 1, ("plan", "recipe=nvfp4", "data/tokenizer=bytes")),
    "a plan of a mesh": Start(1, 1, 1, ("plan", "gpu=B200", "gpus=8", "train.batch_size=8")),
    "a plan of a resume": Start(1, 1, 1, ("plan", "resume=runs/a", "train.steps=4")),
    "a plan of a run": Start(0, 0, 0, ("plan", "runs/a")),
    "a resume": Start(1, 1, 1, ("resume=runs/a", "train.steps=2")),
    "a resume that keeps the learning rates": Start(
        1,
        1,
        1,
        ("resume=runs/c", "resume_step=1", "run.name=d"),
        ("run.name=c", "train.steps=2", "checkpoint.every=1"),
    ),
    "a branch with another recipe": Start(
        1, 1, 1, ("resume=runs/a", "recipe=bf16", "train.steps=2", "run.name=b")
    ),
    "a swap": Start(1, 1, 0, ("swap", "runs/a", "recipe=bf16", "wait=0")),
    "a study": Start(
        1, 1, 0, ("sensitivity", "runs/a", "recipe=nvfp4", "batches=1", "repeats=1"), long=True
    ),
    "a ranking": Start(
        1,
        1,
        0,
        (
            "rank",
            "runs/a",
            "recipe=bf16,nvfp4",
            "policy=last15,all",
            "forks=1",
            "steps=1",
            "batches=1",
        ),
        long=True,
    ),
    "a comparison": Start(0, 0, 0, ("compare", "runs/a", "runs/a")),
    "a report": Start(0, 0, 0, ("report", "runs/a")),
    "an export": Start(0, 1, 0, EXPORT),
    "a verification": Start(0, 1, 0, ("verify", "exported", "against=runs/a"), EXPORT),
    "text from a run": Start(0, 1, 0, ("sample", "runs/a", "tokens=1", "prompt=a")),
    "text from a folder": Start(1, 1, 0, ("sample", "exported", "tokens=1", "prompt=a"), EXPORT),
    "an evaluation": Start(0, 1, 0, ("eval", "runs/a", "batches=1")),
    "an evaluation in two recipes": Start(
        1, 1, 0, ("eval", "runs/a", "recipe=bf16,nvfp4", "batches=1")
    ),
    "a sweep": Start(
        4, 4, 4, ("-m", "recipe=bf16,nvfp4", "optim.lr=1e-3,3e-3", "train.steps=1"), long=True
    ),
    "a sweep that a file asks for": Start(
        1 + 5,
        5,
        5,
        ("-m", "experiment=nvfp4_ablations", "train.steps=1"),
        made=ABLATIONS,
        long=True,
    ),
    "help": Start(1, 0, 0, ("help", "plan"), long=True),
    "the state of the machine": Start(1, 0, 0, ("doctor", "--json"), long=True),
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


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that explained a plan, folded or in full."""
    found: list[str] = []

    def remembered(original: Callable[..., str]) -> Callable[..., str]:
        def explain(*given: Any, **options: Any) -> str:
            found.append(original(*given, **options))
            return found[-1]

        return explain

    patched = [remembered(report.render), remembered(report.summarise)]
    for module in (plan, train, report):
        for name, explain in zip(("render", "summarise"), patched, strict=True):
            if name in vars(module):
                monkeypatch.setattr(module, name, explain)
    return found


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a saved configuration was read, a plan made into a record, and a stretch of it into
    a text or table.
    """
    found: Counter[str] = Counter()

    def counted(where: Any, name: str, key: Callable[..., str]) -> None:
        original = getattr(where, name)

        def call(*given: Any, **options: Any) -> Any:
            found[key(*given)] += 1
            return original(*given, **options)

        monkeypatch.setattr(where, name, call)

    counted(directory, "read_config", lambda run: f"{run} read")
    counted(journal, "compact", lambda plan: "recorded")
    counted(stretches.RecordedStretch, "render", lambda stretch: f"{stretch.title} written")
    counted(origin, "table", lambda plan: "logged")
    return found


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(each, id=name, marks=[pytest.mark.long] * each.long)
        for name, each in STARTS.items()
    ],
)
def test_a_start_composes_once_binds_once_and_explains_once(
    cli: Cli,
    composed: list[Any],
    bound: list[Any],
    explained: list[str],
    kept: Counter[str],
    start: Start,
) -> None:
    cli.trained("run.name=a", "train.steps=1")
    Path("text.txt").write_bytes(cli.text.read_bytes())
    if start.before:
        assert (cli.raw if WHOLE & set(start.before) else cli)(*start.before).code == 0
    composed.clear()
    bound.clear()
    explained.clear()
    kept.clear()
    ended = cli.raw(*start.words) if WHOLE & set(start.words) else cli(*start.words)
    assert ended.code == 0, ended.err or ended.out
    assert (len(composed), len(bound), len(explained)) == (
        start.composed,
        start.bound,
        start.explained,
    )
    if start.explained == 1:
        assert [what for what, times in kept.items() if times > 1] == []
    assert [each for each in start.made if not Path(each).is_dir()] == []


def test_a_start_reads_the_one_recipe_that_it_composes(
    cli: Cli, composed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = folders._Unread.__deepcopy__

    def copied(file: folders._Unread, memo: object) -> Any:
        read.append(file.path.stem)
        return original(file, memo)

    monkeypatch.setattr(folders._Unread, "__deepcopy__", copied)
    assert cli("plan", "recipe=mxfp8").code == 0
    assert len(composed) == 1 and read == ["mxfp8"]


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
