"""Results are kept with their run: events in one chain, also of a run that trains; a resume goes on
with them.
"""

import shutil
from pathlib import Path

import pytest
from command_line import PATIENCE, Cli, evaluations, events, everything, losses, wait_for
from limits import set_limit

from fp4train.errors import UserError
from fp4train.exchange import HELD_OUT, Score, load_trained
from fp4train.exchange.evaluation import record
from fp4train.run.record.directory import is_running, locked
from fp4train.run.record.inbox import ask, pending, wait_for_answer
from fp4train.track import read_metrics

SCORES = [
    Score(task=HELD_OUT, recipe=name, values={"loss": loss, "tokens": 128})
    for name, loss in (("a", 1.5), ("b", 2.0))
]


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "small"))


def test_results_are_events_of_the_runs_metrics(run: Path) -> None:
    before = read_metrics(run / "metrics.jsonl")
    assert record(load_trained(run), SCORES) == str(run / "metrics.jsonl")
    found = read_metrics(run / "metrics.jsonl")  # which checks the chain
    assert found[: len(before)] == before and len(found) == len(before) + 2
    assert evaluations(run) == [
        {"step": 6, "task": HELD_OUT, "recipe": name, "eval/loss": loss, "eval/tokens": 128}
        for name, loss in (("a", 1.5), ("b", 2.0))
    ]


def test_nothing_else_of_the_run_changes(run: Path) -> None:
    before = everything(run)
    record(load_trained(run), SCORES)
    assert [path.name for path, data in everything(run).items() if before.get(path) != data] == [
        "metrics.jsonl"
    ]


@pytest.mark.long
def test_a_run_goes_on_after_an_evaluation_as_without(cli: Cli, small_run: Path) -> None:
    runs = [Path(shutil.copytree(small_run, name)) for name in ("evaluated", "other")]
    record(load_trained(runs[0]), SCORES)
    for run in runs:
        ended = cli.raw(f"resume={run}", "train.steps=8", *cli.paths)
        assert ended.code == 0 and "damaged" not in ended.err and "missing" not in ended.err
    assert losses(runs[0]) == losses(runs[1]) and len(events(runs[0], "evaluation")) == 2
    read_metrics(runs[0] / "metrics.jsonl")


@pytest.mark.long
def test_a_run_that_trains_records_the_results_itself(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "seconds for an answer of the run", PATIENCE)
    words = ("run.name=a", "train.steps=100000", "checkpoint.every=2", "eval.every=0")
    # no checkpoint is removed while it is loaded
    process = cli.start(*words, "checkpoint.keep=100000")
    run = Path("runs/a")
    try:
        wait_for(lambda: any(run.glob("checkpoints/step_*")) and is_running(run))
        said = record(load_trained(run), SCORES)
        assert "2 results are recorded in its metrics" in said
        assert not ask_for_nonsense(run)
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert [each["eval/loss"] for each in evaluations(run)] == [1.5, 2.0] and not pending(run)


def ask_for_nonsense(run: Path) -> bool:
    """A request that would write what no reader of metrics expects is refused, and the run goes
    on.
    """
    request = ask(run, {"evaluation": {"step": 1, "scores": [{"crc": "0"}]}})
    answer = wait_for_answer(run, request, PATIENCE)
    assert answer is not None and "no results of an evaluation" in answer[1]
    return answer[0]


def test_a_directory_in_use_that_does_not_answer_keeps_the_request(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "seconds for an answer of the run", 0.1)
    trained = load_trained(run)
    with locked(run):
        assert "is asked to record this" in record(trained, SCORES)
    assert len(pending(run)) == 1 and not evaluations(run)


def test_metrics_that_are_damaged_are_refused_and_left_alone(run: Path) -> None:
    path = run / "metrics.jsonl"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([text[0].replace('"step": ', '"step": 9'), *text[1:]]))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 1"):
        record(load_trained(run), SCORES)
    assert path.read_bytes() == before


def test_a_run_without_metrics_says_so(cli: Cli) -> None:
    assert cli("run.name=b", "track=none", "train.steps=2").code == 0
    assert "track=none" in record(load_trained(Path("runs/b")), SCORES)
    assert not Path("runs/b/metrics.jsonl").exists()


def test_the_tracker_of_the_run_gets_the_results(cli: Cli) -> None:
    assert cli("run.name=c", "track=tensorboard", "train.steps=2").code == 0
    before = set(Path("runs/c/tensorboard").iterdir())
    record(load_trained(Path("runs/c")), SCORES)
    (new,) = set(Path("runs/c/tensorboard").iterdir()) - before
    assert b"evaluation, task held-out text, recipe a, eval/loss 1.5" in new.read_bytes()
