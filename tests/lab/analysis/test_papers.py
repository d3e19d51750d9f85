"""Figures for papers: each format, the width, the baseline; and what is named is what was logged."""

import json
import shutil
from pathlib import Path

import pytest
from made import write_run

from fp4train.cli import main
from fp4train.lab.analysis import compare, read_history, training_loss

BEGINNINGS = {"svg": b"<?xml", "pdf": b"%PDF"}


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.long
@pytest.mark.usefixtures("pictures")
def test_a_comparison_is_written_in_the_width_that_is_asked_for(
    small_run: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(small_run, tmp_path / "other"))
    out = tmp_path / "figure.svg"
    for runs in ([small_run, other], [small_run]):
        assert command("compare", *runs, f"out={out}", "width=6.3") == 0
        assert f'width="{6.3 * 72:g}pt"' in out.read_text("utf-8")


def test_the_baseline_is_the_run_that_gaps_are_to_and_labels_name_runs(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "other", steps=6)
    out = tmp_path / "all.json"
    words = ("compare", small_run, other, f"baseline={other}", f"out={out}")
    for runs in (words, (words[0], other, small_run, *words[3:])):
        assert command(*runs, f"labels={','.join(run.name for run in runs[1:3])}") == 0
        rows = json.loads(out.read_text("utf-8"))["runs"]
        assert [row["run"] for row in rows] == ["other", small_run.name]
        assert rows[0]["gap"] is None and rows[0]["tokens_per_s"] == 1000
    assert command(*words[:3], "width=1") == command(*words[:3], "basline=x") == 1
    said = capsys.readouterr().err
    assert "width=1 must be a number of inches" in said and "did you mean 'baseline'?" in said


@pytest.mark.long
def test_a_report_writes_its_figures_to_files_and_takes_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, level) for name, level in (("a", 3.0), ("b", 3.3))]
    out = tmp_path / "r.html"
    words = ("report", *runs, f"baseline={runs[1]}", f"out={out}")
    assert command(*words, "figures=svg,pdf", "width=6.3") == 0
    for ending, beginning in BEGINNINGS.items():
        assert (tmp_path / f"r-curves.{ending}").read_bytes().startswith(beginning)
    curves = (tmp_path / "r-curves.svg").read_text("utf-8")
    assert "gap to b" in curves and 'width="453.6pt"' in curves
    assert "-9.09%" in out.read_text("utf-8"), "3.0 is 9.09 % below 3.3"
    assert command(*words, "figures=eps") == 1
    assert "figures[0]='eps' must be one of png, svg, pdf" in capsys.readouterr().err


def test_the_training_loss_is_one_number_in_the_terminal_and_the_table(small_run: Path) -> None:
    found = training_loss(small_run)
    assert found is not None and found.steps == 1, "of six steps"
    of_curve = read_history(small_run).loss("train/loss").values[-1]
    assert found.loss == compare([small_run]).rows[0].train_loss == of_curve
