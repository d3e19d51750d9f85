"""Runs with classes of the user's own, from the first step to a resume; a run directory never
imports code.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Cli, StopAt, events, losses

from fp4train.run.record.journal import read_journal, swaps
from fp4train.sealed import open_line, seal_line, sealed

LAB = '''
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from fp4train.models.llama import Llama
from fp4train.optim.schedule import Schedule
from fp4train.precision import MXFP8, Recipe as RecipeBase
from fp4train.track import NullTracker

@dataclass(frozen=True, kw_only=True)
class Model(Llama):
    """A Llama of another package."""

@dataclass(frozen=True, kw_only=True)
class Recipe(MXFP8):
    """A recipe of another package."""

@dataclass(frozen=True, kw_only=True)
class Flat:
    """A model without blocks."""
    width: int = 32
    def build(self, *, vocab_size, seq_len):
        return FlatModel(self.width, vocab_size)

class FlatModel(nn.Module):
    def __init__(self, width, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.up = nn.Linear(width, width, bias=False)
    def forward(self, tokens_BT, targets_BT=None):
        logits_BTV = F.linear(self.up(self.embed(tokens_BT)), self.embed.weight)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

@dataclass(frozen=True, kw_only=True)
class Nowhere:
    """A tracker of another package."""
    def build(self, run_dir, run_name, config, *, resume_step=None):
        return NullTracker()

@dataclass(frozen=True, kw_only=True)
class Raises(RecipeBase):
    def operands(self):
        return {}["fprop"]

@dataclass(frozen=True, kw_only=True)
class Silent(RecipeBase):
    "A recipe that does not say what it does."

@dataclass(frozen=True, kw_only=True)
class Falling(Schedule):
    to: float = -1.0
    def after_warmup(self, step, warmup, steps):
        return self.to

@dataclass(frozen=True, kw_only=True)
class Nothing:
    optional: bool = True
    def build(self, run_dir=None, seq_len=0, seed=0, vocab_size=0):
        return None

@dataclass(frozen=True, kw_only=True)
class Logits(Flat):
    def build(self, *, vocab_size, seq_len):
        model = super().build(vocab_size=vocab_size, seq_len=seq_len)
        forward = model.forward
        model.forward = lambda tokens, targets: forward(tokens)
        return model
'''
OWN = ("--config-dir", "mine", "plugins=[ownlab]")


@pytest.fixture(autouse=True)
def mine(cli: Cli) -> Iterator[None]:
    """The folder mine, with a plugin and one YAML file per class."""
    for path, text in {
        "ownlab.py": LAB,
        "model/own.yaml": "_target_: ownlab.Model\nwidth: 32\nlayers: 2\nheads: 2\nkv_heads: "
        "1\nhidden: 64\n",
        "model/flat.yaml": "_target_: ownlab.Flat\n",
        "recipe/own.yaml": "_target_: ownlab.Recipe\n",
        "model/nothing.yaml": "_target_: ownlab.Nothing\n",
        "model/logits.yaml": "_target_: ownlab.Logits\n",
        "data/nothing.yaml": "_target_: ownlab.Nothing\n",
        "recipe/raises.yaml": "_target_: ownlab.Raises\n",
        "recipe/silent.yaml": "_target_: ownlab.Silent\n",
        "schedule/falling.yaml": "_target_: ownlab.Falling\n",
        "track/own.yaml": "_target_: ownlab.Nowhere\n",
        "experiment/own.yaml": "# @package _global_\nplugins: [ownlab]\n",
    }.items():
        (Path("mine") / path).parent.mkdir(parents=True, exist_ok=True)
        (Path("mine") / path).write_text(text)
    yield
    for name in ("ownlab", "evil"):
        sys.modules.pop(name, None)


def imported() -> bool:
    return "ownlab" in sys.modules


def test_a_run_with_a_plugin_is_saved_resumed_and_planned(cli: Cli) -> None:
    assert cli(*OWN, "model=own", "run.name=a", "train.steps=2").code == 0
    assert "plugins:\n- ownlab\n" in Path("runs/a/config.yaml").read_text()
    sys.modules.pop("ownlab")
    assert cli(*OWN, "resume=runs/a", "train.steps=3").code == 0
    assert sorted(losses("runs/a")) == [1, 2, 3]
    planned = cli.raw("plan", *OWN, "resume=runs/a", "recipe=own", "train.steps=6", "phases=none")
    assert planned.code == 0 and "Recipe" in planned.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("recipe=raises", "the plugin ownlab raised KeyError: 'fprop' ("),
        ("recipe=silent", "recipe: Silent has no method operands"),
        ("schedule=falling", "Falling gives -1.0 at step 0"),
        (
            "model=nothing",
            "Nothing.build gave an object of NoneType; it must return a torch.nn.Mod",
        ),
        ("data=nothing", "Nothing.build gave an object of NoneType; it must return a TokenData"),
        ("model=logits", "FlatModel.forward(tokens, targets) gave a Tensor ["),
    ],
)
def test_what_a_plugin_does_wrong_is_one_line(cli: Cli, words: str, said: str) -> None:
    ended = cli(*OWN, *words.split(), "run.name=a", "train.steps=2", "schedule.warmup=0")
    assert ended.code == 1 and said in ended.message and "Traceback" not in ended.err


def test_a_model_without_blocks_has_a_plan_and_no_estimate(cli: Cli) -> None:
    words = ("plan", *OWN, "model=flat", "policy=all")
    assert cli(*words).code == 0
    ended = cli(*words, "gpu=H100")
    assert ended.code == 1
    assert "FlatModel cannot be estimated: it takes torch.int64" in ended.message
    assert "fp4train_blocks" in ended.message


@pytest.mark.parametrize(
    "command",
    [
        ["resume=runs/a", "train.steps=3"],
        pytest.param(["plan", "resume=runs/a"], marks=pytest.mark.long),
        pytest.param(
            ["--config-dir", "mine", "resume=runs/a", "train.steps=3"], marks=pytest.mark.long
        ),
        ["--config-dir", "mine", "run.name=a", "model=own", "train.steps=2"],
    ],
)
def test_a_saved_run_needs_its_plugins_named_again(cli: Cli, command: list[str]) -> None:
    assert cli(*OWN, "model=own", "run.name=a", "train.steps=2").code == 0
    sys.modules.pop("ownlab")
    ended = cli(*command)
    assert ended.code == 1 and "add plugins=[ownlab]" in ended.message
    assert not imported() and sorted(losses("runs/a")) == [1, 2]


@pytest.mark.long
def test_swapping_a_run_with_a_plugin_names_it_too(cli: Cli, stop_at: StopAt) -> None:
    stop_at(1)
    assert (
        cli(
            *OWN, "model=own", "run.name=a", "train.steps=3", "checkpoint.every=1", "phases=none"
        ).code
        == 137
    )
    stop_at(-1)
    sys.modules.pop("ownlab")
    asked = cli.raw("swap", "runs/a", "recipe=bf16")
    assert asked.code == 1 and "add plugins=[ownlab]" in asked.message and not imported()
    assert cli.raw("swap", "runs/a", "recipe=own", "--config-dir", "mine").code == 1
    assert not Path("runs/a/swap_requests").exists()
    assert cli.raw("swap", "runs/a", "recipe=own", *OWN).code == 0
    assert cli(*OWN, "resume=runs/a").code == 0
    assert [values[-1] for values in losses("runs/a").values()] == ["NVFP4", "Recipe", "Recipe"]
    assert swaps(read_journal(Path("runs/a")))[0]["recipe"]["_target_"] == "ownlab.Recipe"
    assert "add plugins=[ownlab]" in cli("resume=runs/a", "train.steps=4").message


def test_a_hostile_run_directory_imports_nothing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.trained("run.name=a", "train.steps=1")
    Path("evil.py").write_text("open('hit', 'w')\n" + LAB)
    monkeypatch.syspath_prepend(str(cli.folder))
    config = Path("runs/a/config.yaml")
    # without the first line, which holds its checksum
    innocent = config.read_text().partition("\n")[2]
    config.write_text(innocent.replace("plugins: []", "plugins: [evil]"))
    assert "evil" in config.read_text()
    assert cli("resume=runs/a", "train.steps=2", *cli.paths).code == 0, "the names are information"
    assert "evil" not in config.read_text(), "and say what this command named"
    hostile = innocent.replace("plugins: []", "plugins: [evil]").replace(
        "fp4train.models.llama.Llama", "evil.Model"
    )
    config.write_text(hostile)
    Path("runs/a/swap_requests").mkdir()
    for command in (
        ["resume=runs/a", "train.steps=3"],
        ["plan", "resume=runs/a"],
        ["run.name=a", "train.steps=1"],
    ):
        said = cli(*command).message
        assert said.startswith(
            "runs/a/config.yaml: model._target_='evil.Model' is no configuration class of fp4train"
        )
    config.write_text(innocent)
    recipe = {"_target_": "evil.Recipe"}
    Path("runs/a/swap_requests/1.json").write_bytes(
        sealed({"recipe": recipe, "name": "x", "at": None})
    )
    assert cli("resume=runs/a", "train.steps=3", *cli.paths).code == 0
    assert "evil.Recipe" in events("runs/a", "swap refused")[0]["reason"]
    journal = Path("runs/a/history.jsonl")
    lines = journal.read_bytes()
    swap = open_line(lines.splitlines()[-1]) | {
        "event": "swap",
        "name": "x",
        "at": 3,
        "recipe": recipe,
        "stretches": [],
    }
    journal.write_bytes(lines + seal_line(json.dumps(swap).encode()))
    assert "evil.Recipe" in cli("resume=runs/a", "train.steps=4").message
    assert "evil" not in sys.modules and not Path("hit").exists()


def test_a_yaml_file_cannot_name_plugins(cli: Cli) -> None:
    ended = cli("--config-dir", "mine", "experiment=own", "run.name=a")
    assert ended.message == (
        "plugins=[ownlab] comes from a YAML file, which cannot import packages: add it to "
        "the command line"
    )
    assert not imported()
    assert cli(*OWN, "experiment=own", "run.name=a", "train.steps=1").code == 0


def test_a_plugin_that_is_not_there_ends_before_anything_is_written(cli: Cli) -> None:
    ended = cli("--config-dir", "mine", "plugins=[mine/ownlab.py]", "run.name=a")
    assert "not by a path: plugins=[ownlab], with --config-dir mine" in ended.message
    assert "there is no module onwlab among the installed packages and mine" in (
        cli("--config-dir", "mine", "plugins=[onwlab]", "run.name=a").message
    )
    assert (
        "no module ownlab among the installed packages: install"
        in cli("plugins=[ownlab]", "run.name=a").message
    )
    assert not Path("runs").exists()
