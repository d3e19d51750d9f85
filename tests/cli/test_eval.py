"""`fp4train eval` as people run it: tables and JSON, recipes, what it records, what it refuses."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Outcome, evaluations

from fp4train.cli import main

Eval = Callable[..., Outcome]


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "small"))


@pytest.fixture
def evaluate(run: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> Eval:
    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(run), *arguments])
        shown = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, shown.out, shown.err)

    return call


def test_held_out_text_in_high_precision_and_in_the_recipe_of_the_run(
    evaluate: Eval, run: Path
) -> None:
    found = evaluate()
    assert found.code == 0
    rows = [
        line.split()
        for line in found.out.splitlines()
        if line.startswith(("held-out", "high precision", "NVFP4"))
    ]
    assert rows[0] == ["held-out", "text", "loss", "tokens", "bytes", "bits_per_byte"]
    assert [row[0] for row in rows[1:]] == [
        "high",
        "NVFP4",
    ] and f"recorded in {run / 'metrics.jsonl'}" in found.out
    assert [each["recipe"] for each in evaluations(run)] == ["high precision (bfloat16)", "NVFP4"]


def test_recipes_are_named_and_compared(evaluate: Eval) -> None:
    data = json.loads(evaluate("recipe=bf16,mxfp8,nvfp4", "policy=all", "--json").out)
    assert [score["recipe"] for score in data["scores"]] == ["bf16", "mxfp8", "nvfp4"]
    assert len({score["values"]["loss"] for score in data["scores"]}) == 3 and data["step"] == 6


def test_record_false_writes_nothing(evaluate: Eval, run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    assert evaluate("record=false").code == 0 and (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_cannot_be_written_is_measured_and_not_recorded(
    evaluate: Eval, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run or mode != os.W_OK)
    found = evaluate("recipe=bf16")
    assert found.code == 0 and "held-out text" in found.out
    assert f"{run} cannot be written: not recorded" in found.out
    assert (run / "metrics.jsonl").read_bytes() == before


def test_text_is_read_from_a_file(evaluate: Eval, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("the quick brown fox", encoding="utf-8")
    data = json.loads(evaluate(f"text={tmp_path / 'some.txt'}", "recipe=fp32", "--json").out)
    assert data["scores"][0]["values"]["bytes"] == 19


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["recipe=nvfp5"], "recipe=nvfp5: there is no such recipe; did you mean 'nvfp4'?"),
        (["step=5"], "has no checkpoint of step 5"),
        (["task=x", "text=y"], "task=… and text=… are two evaluations"),
        (["limit=5"], "limit=… is of task=…, not of held-out text"),
        (["text=y", "batches=5"], "batches=… is of held-out text, not of text=…"),
        (["text=gone"], "text=gone does not exist"),
        (["batches=x"], "batches='x' must be a whole number or null"),
        (["tsk=x"], "unknown key 'tsk'; did you mean 'task'?"),
        (["data.path=gone.txt"], "data.path=gone.txt does not exist"),
        (["data.cache=gone"], "data.cache is no path in the configuration of"),
    ],
)
def test_what_cannot_be_done_is_refused(
    evaluate: Eval, run: Path, arguments: list[str], said: str
) -> None:
    found = evaluate(*arguments)
    assert found.code == 1 and said in found.message and not evaluations(run)


def test_without_lm_eval_the_extra_is_named(
    evaluate: Eval, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fp4train.exchange.harness", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'fp4train[lm-eval]'" in evaluate("task=hellaswag").message


def test_a_folder_of_hugging_face_is_measured_on_text_and_has_none_of_its_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], evaluate: Eval
) -> None:
    from fp4train.exchange import export_huggingface

    folder = tmp_path / "folder"
    text = tmp_path / "some.txt"
    export_huggingface(run, folder)
    text.write_text("the quick brown fox", encoding="utf-8")
    mine = json.loads(evaluate(f"text={text}", "recipe=fp32", "--json").out)["scores"]
    before = sorted(folder.iterdir())
    for words, code in ((["text=" + str(text), "recipe=fp32", "--json"], 0), ([], 1)):
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(folder), *words])
        assert ended.value.code == code
    shown = capsys.readouterr()
    assert (
        json.loads(shown.out)["scores"] == mine
        and "has no held-out text: give text=PATH" in shown.err
    )
    assert sorted(folder.iterdir()) == before
