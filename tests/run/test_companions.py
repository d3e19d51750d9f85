"""Hooks of one's own: what they hear and in which order, what one that raises leaves behind, and that
nothing but training asks for their classes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Cli, losses, steps

LAB = '''
import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fp4train.companion import Companion
from fp4train.track import NullTracker

@dataclass(frozen=True, kw_only=True)
class Hook(Companion):
    """Writes each moment that it hears of to its folder, and raises in one."""
    name: str = "first"
    fails: str = ""
    at: int = 2

    def hear(self, run, moment, *more):
        with open(self.folder(run) / "heard.jsonl", "a") as file:
            print(json.dumps([self.name, moment, run.step, *more]), file=file)
        if moment == self.fails and run.step >= self.at:
            raise ValueError("no more\\nof this")

    def begin(self, run):
        self.hear(run, "begin")

    def before_step(self, run):
        self.hear(run, "before_step")

    @contextmanager
    def around_step(self, run, recipe):
        self.hear(run, "around_step", recipe.name)
        yield
        self.hear(run, "left_step")

    def after_step(self, run, step):
        self.hear(run, "after_step", step.index)

    def on_numbers(self, run, step, values):
        values[f"mine/{self.name}"] = step.index / 2
        self.hear(run, "on_numbers", step.index, "perf/tokens_per_s" in values)

    def after_evaluation(self, run, values):
        values["mine/evaluated"] = values["val/loss"]
        self.hear(run, "after_evaluation")

    def on_save(self, run):
        self.hear(run, "on_save")

    def close(self, run, error):
        self.hear(run, "close", type(error).__name__)

@dataclass(frozen=True, kw_only=True)
class Hiding(Companion):
    """Hides errors of the step that it is around."""
    def around_step(self, run, recipe):
        return suppress(Exception)

@dataclass(frozen=True, kw_only=True)
class Leaves(Companion):
    """Would end the process."""
    def after_step(self, run, step):
        raise SystemExit(7)

@dataclass(frozen=True, kw_only=True)
class Strange(Companion):
    """Adds what is no number."""
    def on_numbers(self, run, step, values):
        values["mine/strange"] = [1]

@dataclass(frozen=True, kw_only=True)
class Nowhere:
    """A tracker of another package."""
    def build(self, run_dir, run_name, config, *, resume_step=None):
        return NullTracker()
'''
OWN = ("--config-dir", "mine", "plugins=[hooklab]")
HOOK = "hooks=[{_target_: hooklab.Hook}]"
BF16 = ("recipe=bf16", "phases=none")


@pytest.fixture(autouse=True)
def mine(cli: Cli) -> Iterator[None]:
    """The folder mine, with a plugin."""
    Path("mine/track").mkdir(parents=True)
    Path("mine/hooklab.py").write_text(LAB)
    Path("mine/track/own.yaml").write_text("_target_: hooklab.Nowhere\n")
    yield
    sys.modules.pop("hooklab", None)


def heard(run: str = "runs/a") -> list[list[object]]:
    lines = Path(run, "hooks/Hook/heard.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def logged(key: str, run: str = "runs/a") -> dict[int, float]:
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def test_a_hook_hears_of_each_moment_in_turn_and_adds_to_what_is_logged(cli: Cli) -> None:
    words = (*BF16, "train.steps=2", "eval.every=1", "checkpoint.every=0")
    assert cli(*OWN, HOOK, "run.name=a", *words).code == 0
    moments = [entry[1:] for entry in heard()]
    assert moments == [
        ["begin", 0],
        ["before_step", 0],
        ["around_step", 0, "BF16"],
        ["left_step", 0],
        ["after_step", 0, 0],
        ["after_evaluation", 1],
        ["on_numbers", 1, 0, True],
        ["before_step", 1],
        ["around_step", 1, "BF16"],
        ["left_step", 1],
        ["after_step", 1, 1],
        ["after_evaluation", 2],
        ["on_numbers", 2, 1, True],
        ["on_save", 2],
        ["close", 2, "NoneType"],
    ]
    assert logged("mine/first") == {1: 0.0, 2: 0.5}
    assert logged("mine/evaluated") == logged("val/loss")
    cli.trained("run.name=b", *words)
    assert losses("runs/a") == losses("runs/b")


@pytest.mark.parametrize(
    ("moment", "saved"),
    [
        pytest.param("before_step", 3, marks=pytest.mark.long),
        ("around_step", 3),
        ("left_step", 3),
        ("after_step", 3),
        ("on_numbers", 2),
        pytest.param("after_evaluation", 2, marks=pytest.mark.long),
        ("on_save", 2),
        ("close", 4),
    ],
)
def test_a_hook_that_raises_is_named_and_the_last_whole_state_is_saved(
    cli: Cli, moment: str, saved: int
) -> None:
    words = (*BF16, "train.steps=4", "eval.every=2", "checkpoint.every=2")
    both = "hooks=[{_target_: hooklab.Hook, fails: %s}, {_target_: hooklab.Hook, name: second}]"
    ended = cli(*OWN, both % moment, "run.name=a", *words)
    assert ended.code == 1
    where = "around_step" if moment == "left_step" else moment
    assert f"{where} of the hook hooklab.Hook raised ValueError: no more (" in ended.message
    assert "hooklab.py, line " in ended.message
    assert ended.message.endswith(f"; the run ended after step {saved}")
    assert steps()[-1] == saved
    assert [entry[0] for entry in heard() if entry[1] == "close"] == ["first", "second"]
    assert ["second", "on_numbers", saved, saved - 1, True] in heard()
    assert sorted(losses("runs/a")) == [*range(1, saved + 1)]
    if moment == "on_numbers":
        assert cli("resume=runs/a", "hooks=[]").code == 0
        cli.trained("run.name=b", *words)
        assert losses("runs/a") == losses("runs/b")


def test_a_hook_that_exits_is_named_and_the_state_is_saved(cli: Cli) -> None:
    leaves = "hooks=[{_target_: hooklab.Leaves}]"
    ended = cli(*OWN, leaves, "run.name=a", *BF16, "train.steps=4")
    assert "after_step of the hook hooklab.Leaves raised SystemExit: 7 (" in ended.message
    assert steps() == [1] and "\n" not in ended.message


def test_a_value_that_is_no_number_is_the_hooks_fault(cli: Cli) -> None:
    strange = "hooks=[{_target_: hooklab.Strange}]"
    ended = cli(*OWN, strange, "run.name=a", *BF16, "train.steps=4")
    assert "on_numbers of the hook hooklab.Strange raised TypeError: mine/strange" in ended.message
    assert sorted(losses("runs/a")) == [1, 2] and steps() == [2]


def test_a_hook_hides_no_error_of_the_step(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4train.run.step import EagerSteps

    monkeypatch.setattr(EagerSteps, "step", lambda *arguments: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli(*OWN, "hooks=[{_target_: hooklab.Hiding}]", "run.name=a", *BF16)


def test_only_training_asks_for_classes_of_hooks_and_trackers(cli: Cli) -> None:
    words = ("run.name=a", "train.steps=1", *BF16)
    assert cli(*OWN, HOOK, "track=own", *words).code == 0
    sys.modules.pop("hooklab")
    Path("mine/hooklab.py").unlink()
    for command in (
        ["export", "runs/a", "to=hf", "out=folder"],
        ["eval", "runs/a"],
        ["plan", "runs/a"],
    ):
        assert cli.raw(*command).code == 0, command
    assert cli("init=runs/a", "run.name=b", "train.steps=1", *BF16).code == 0
    ended = cli("resume=runs/a", "train.steps=2")
    assert ended.code == 1 and "add plugins=[hooklab]" in ended.message
    assert cli("resume=runs/a", "train.steps=2", "hooks=[]", "track=jsonl").code == 0
    assert sorted(losses("runs/a")) == [1, 2] and "hooklab" not in sys.modules


def test_a_hook_is_a_companion_and_its_class_is_allowed(cli: Cli) -> None:
    wrong = cli(*OWN, "hooks=[{_target_: hooklab.Nowhere}]", "run.name=a")
    assert "hooks" in wrong.message and "it does not inherit from Companion" in wrong.message
    assert "add plugins=[hooklab]" in cli("--config-dir", "mine", HOOK, "run.name=a").message
    assert not Path("runs/a").exists()


def test_folders_of_companions_go_with_the_run(cli: Cli) -> None:
    words = ("run.name=a", "train.steps=1", *BF16)
    assert cli(*OWN, HOOK, "profile.steps=[1]", *words).code == 0
    assert Path("runs/a/hooks").is_dir() and Path("runs/a/profile").is_dir()
    Path("runs/a/notes.txt").write_text("mine")
    assert cli(*words, "run.overwrite=true").code == 0
    assert not Path("runs/a/hooks").exists() and not Path("runs/a/profile").exists()
    assert Path("runs/a/notes.txt").read_text() == "mine"


def test_a_resume_keeps_what_hooks_wrote(cli: Cli) -> None:
    assert cli(*OWN, HOOK, "run.name=a", "train.steps=1", *BF16).code == 0
    assert cli(*OWN, "resume=runs/a", "train.steps=2").code == 0
    assert [entry[1:3] for entry in heard() if entry[1] == "begin"] == [["begin", 0], ["begin", 1]]
