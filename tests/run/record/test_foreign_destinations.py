"""A configuration that this user did not write says neither where a run's numbers are sent nor
under which id; what it downloads is named.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from command_line import STEADY, Cli, everything, reseal_config

from fp4train.track import NullTracker, WandbTracking

WANDB = {"_target_": "fp4train.track.WandbTracking", "project": "theirs", "entity": "them"}
RESUME = ("resume=runs/a", "train.steps=3")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[WandbTracking]:
    """The trackers that would have started wandb."""
    trackers: list[WandbTracking] = []

    @functools.wraps(WandbTracking.build)
    def build(self: WandbTracking, *_: object, **__: object) -> NullTracker:
        trackers.append(self)
        return NullTracker()

    monkeypatch.setattr(WandbTracking, "build", build)
    return trackers


@pytest.fixture
def foreign(cli: Cli, sent: list[WandbTracking]) -> Path:
    """A finished run in runs/a, whose configuration says where another user's numbers go."""
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    reseal_config(Path("runs/a"), lambda values: values.update(track=dict(WANDB)))
    return Path("runs/a")


@pytest.mark.parametrize("branch", [(), ("run.name=b",)], ids=["in place", "a branch"])
def test_where_it_sends_is_named_again_or_nothing_is_sent(
    cli: Cli, foreign: Path, sent: list[WandbTracking], branch: tuple[str, ...]
) -> None:
    before = {path: data for path, data in everything(cli.folder).items() if path.name != ".lock"}
    said = cli.raw(*RESUME, *branch, *cli.paths).message
    assert said.startswith(
        "runs/a/config.yaml names paths, services or commands outside of the run and has no signature"
    )
    assert said.endswith(
        "nothing was read, written or sent there. Add what is right to the command: "
        "track.entity=them track.project=theirs"
    )
    assert not sent
    after = {path: data for path, data in everything(cli.folder).items() if path.name != ".lock"}
    assert after == before
    own = ("track.project=mine", "track.entity=null")
    assert cli.raw(*RESUME, *branch, *cli.paths, *own).code == 0
    assert [(tracker.project, tracker.entity) for tracker in sent] == [("mine", None)]


def test_a_command_of_somebody_else_is_not_run(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    reseal_config(Path("runs/a"), lambda values: values["eval"].update(command="touch ran"))
    said = cli.raw(*RESUME, *cli.paths).message
    assert "Add what is right to the command: 'eval.command=" in said and "touch ran" in said
    assert cli.raw(*RESUME, *cli.paths, "eval.command=null").code == 0
    assert not Path("ran").exists()


def test_what_this_user_chose_needs_no_naming(cli: Cli, sent: list[WandbTracking]) -> None:
    assert (
        cli("run.name=a", "train.steps=2", *STEADY, "track=wandb", "track.entity=my-lab").code == 0
    )
    assert cli.raw(*RESUME).code == 0
    assert [tracker.entity for tracker in sent] == ["my-lab", "my-lab"]


def test_paths_and_destinations_are_one_message_and_another_tracker_needs_none(
    cli: Cli, foreign: Path
) -> None:
    said = cli.raw(*RESUME).message
    assert "names paths, services or commands outside of the run" in said
    assert "nothing was read, written or sent there" in said and "track.entity=them" in said
    assert cli.raw(*RESUME, *cli.paths, "track=jsonl").code == 0


@pytest.mark.parametrize(
    "verb", [("plan", "resume=runs/a"), ("eval", "runs/a", "record=false", "batches=1")]
)
def test_verbs_that_send_nothing_ask_for_paths_alone(
    cli: Cli, foreign: Path, verb: tuple[str, ...]
) -> None:
    ended = cli.raw(*verb, *cli.paths)
    assert ended.code == 0, ended.err


@pytest.mark.long
def test_the_id_of_somebody_elses_charts_is_not_taken_over(
    cli: Cli, foreign: Path, sent: list[WandbTracking]
) -> None:
    (foreign / "wandb").mkdir()
    (foreign / "wandb" / "run_id").write_text("victim01\n")
    ended = cli.raw(*RESUME, *cli.paths, "track=wandb")
    assert ended.code == 0 and "its charts begin anew, under another id" in ended.err
    assert not (foreign / "wandb" / "run_id").exists()
    (foreign / "wandb" / "run_id").write_text("mine0001\n")
    assert cli.raw("resume=runs/a", "train.steps=4").code == 0
    assert (foreign / "wandb" / "run_id").read_text() == "mine0001\n", "signed by now"


def test_what_a_foreign_configuration_downloads_is_said_in_one_line(
    cli: Cli, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(values: dict[str, Any]) -> None:
        values["data"] = {
            "_target_": "fp4train.data.huggingface.HuggingFace",
            "name": "somebody/texts",
            "tokenizer": {"_target_": "fp4train.data.tokenizers.Bytes"},
        }

    reseal_config(foreign, change)
    ended = cli.raw("plan", "resume=runs/a")
    (line,) = [line for line in ended.err.splitlines() if "Hugging Face hub" in line]
    assert "runs/a/config.yaml has no signature" in line and line.endswith(
        "data.name=somebody/texts"
    )
