"""`eval.command` and `eval.tasks`: programs beside training that judge its checkpoints."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from command_line import Cli, evaluations, losses

SHORT = ("run.name=a", "recipe=bf16", "phases=none", "eval.every=0")
ECHO = "eval.command='echo judged {run}@{step} $MASTER_PORT; test {step} = 4'"


def test_a_command_sees_each_checkpoint_and_its_failure_ends_no_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1234")
    words = ("train.steps=4", "checkpoint.every=2")
    ended = cli(*SHORT, *words, ECHO)
    assert ended.code == 0
    printed = {path.name: path.read_text() for path in Path("runs/a/judged").iterdir()}
    assert printed["step_4.log"] == "judged runs/a@4\n"
    assert set(printed) <= {"step_2.log", "step_4.log"}
    assert "step 4 is not judged" not in ended.err
    if "step_2.log" in printed:  # the last one may be written before it is looked for
        assert "step 2 is not judged: it ended with 1 (judged runs/a@2); see" in ended.err
    cli.trained("run.name=b", *SHORT[1:], *words)
    assert losses("runs/a") == losses("runs/b")


def test_a_failure_is_told_with_the_file_that_has_its_reason(cli: Cli) -> None:
    ended = cli(*SHORT, "train.steps=1", "eval.command='echo why >&2; exit 3'")
    log = "runs/a/judged/step_1.log"
    assert ended.code == 0
    assert f"step 1 is not judged: it ended with 3 (why); see {log}" in ended.err
    assert Path(log).read_text() == "why\n"


def test_what_a_command_prints_is_no_result(cli: Cli) -> None:
    lines = (
        '{"run": "a", "text": "b"}',
        '{"run":',
        '{"run": "a", "scores": [{"values": {"x": 1}}]}',
    )
    Path("printed").write_text("\n".join(lines))
    ended = cli(*SHORT, "train.steps=1", "eval.command='cat printed'")
    assert ended.code == 0 and "not judged" not in ended.err, ended.err
    assert not evaluations("runs/a")


def test_a_signal_ends_the_wait_for_a_command(cli: Cli) -> None:
    def interrupt() -> None:
        while not Path("judging").exists():
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    ended = cli(*SHORT, "train.steps=1", "eval.command='touch judging; exec sleep 60'")
    thread.join()
    assert ended.code == 0 and "runs/a: step 1, done" in ended.out
    assert "step 1 is not judged: the run ended" in ended.err


def test_a_run_that_ends_early_ends_the_command(cli: Cli) -> None:
    Path("mine").mkdir()
    Path("mine/judgelab.py").write_text(
        "from dataclasses import dataclass\n"
        "from pathlib import Path\n"
        "from fp4train.companion import Companion\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Ends(Companion):\n"
        "    def after_step(self, run, step):\n"
        "        assert not Path('runs/a/judged').exists()\n"
    )
    words = ("train.steps=10000", "checkpoint.every=1", "eval.command='exec sleep 1000'")
    hook = ("--config-dir", "mine", "plugins=[judgelab]", "hooks=[{_target_: judgelab.Ends}]")
    ended = cli(*hook, *SHORT, *words)
    sys.modules.pop("judgelab")
    assert ended.code == 1 and "judgelab.Ends raised AssertionError" in ended.message


@pytest.mark.long
def test_what_judges_a_run_ends_where_the_run_is_killed(cli: Cli) -> None:
    command = "eval.command='(echo $$ >judge; exec sleep 600); true'"
    with cli.start(*SHORT, "train.steps=1", command) as run:
        while not Path("judge").exists() or not Path("judge").read_text():
            time.sleep(0.05)
        run.kill()
        run.communicate()
    status = Path("/proc", Path("judge").read_text().strip(), "stat")
    for _ in range(100):
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("it runs on")


@pytest.mark.long
def test_a_wrong_name_of_a_task_is_told_when_the_run_begins(cli: Cli) -> None:
    ended = cli(*SHORT, "train.steps=1", "checkpoint.every=0", "eval.tasks=[none.yaml]")
    first = ended.err.index("eval.tasks is not judged: it ended with 1 (")
    assert "task=none.yaml does not exist); see runs/a/judged/eval.tasks.log" in ended.err[first:]
    assert first < ended.err.index("step 1 is not judged")


@pytest.mark.long
def test_tasks_of_a_checkpoint_are_in_the_metrics_at_its_step(cli: Cli) -> None:
    task = {
        "task": "quotes",
        "output_type": "loglikelihood_rolling",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(Path("quotes.jsonl").absolute())}},
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    Path("quotes.yaml").write_text(json.dumps(task))
    Path("quotes.jsonl").write_text(json.dumps({"text": "to be"}) + "\n")
    ended = cli(*SHORT, "train.steps=2", "eval.tasks=[quotes.yaml]")
    assert ended.code == 0 and "is not judged" not in ended.err, ended.err
    results = evaluations("runs/a")
    assert [(result["step"], result["task"]) for result in results] == [(2, "quotes")], results
    assert results[0]["eval/bits_per_byte"] > 0
