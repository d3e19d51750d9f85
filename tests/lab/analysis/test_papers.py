"""Figures for papers: each format, the width, the baseline; and what is named is what was logged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from lengths import long_but
from made import write_run

from fp4train.cli import main
from fp4train.cli.train import training_loss
from fp4train.lab.analysis import Comparison, read_history
from fp4train.lab.analysis.curves import smoothing
from fp4train.lab.analysis.history import Series

BEGINNINGS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("ending", long_but([".svg"], BEGINNINGS))
def test_a_comparison_and_the_curves_of_a_run_are_written_in_each_format(
    small_run: Path, tmp_path: Path, ending: str
) -> None:
    other = Path(shutil.copytree(small_run, tmp_path / "other"))
    for runs in ([small_run, other], [small_run]):
        out = tmp_path / f"figure{ending}"
        assert command("compare", *map(str, runs), f"out={out}", "width=6.3") == 0
        assert out.read_bytes().startswith(BEGINNINGS[ending])
    if ending == ".svg":
        assert f'width="{6.3 * 72:g}pt"' in out.read_text("utf-8")


def test_the_baseline_is_the_run_that_gaps_are_to(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(small_run, tmp_path / "other"))
    out = tmp_path / "all.json"
    assert command("compare", str(small_run), str(other), f"baseline={other}", f"out={out}") == 0
    rows = json.loads(out.read_text("utf-8"))["runs"]
    assert [row["run"] for row in rows] == ["other", "small"] and rows[0]["gap"] is None
    assert command("compare", str(small_run), str(other), "width=1") == 1
    assert command("compare", str(small_run), str(other), "basline=x") == 1
    said = capsys.readouterr().err
    assert "width=1 must be a number of inches" in said and "did you mean 'baseline'?" in said


@pytest.mark.long
def test_a_report_writes_its_figures_to_files_and_takes_a_baseline(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, level, errors=True) for name, level in (("a", 3.0), ("b", 3.3))
    ]
    out = tmp_path / "r.html"
    words = (
        "report",
        *map(str, runs),
        f"baseline={runs[1]}",
        f"out={out}",
        "figures=svg,pdf",
        "width=6.3",
    )
    assert command(*words) == 0
    names = {
        f"r-{name}{ending}"
        for name in ("curves", "errors-1", "errors-2")
        for ending in (".svg", ".pdf")
    }
    assert {path.name for path in tmp_path.glob("r-*")} == names
    curves = (tmp_path / "r-curves.svg").read_text("utf-8")
    assert "gap to b" in curves and 'width="453.6pt"' in curves
    assert "-9.09%" in out.read_text("utf-8"), "3.0 is 9.09 % below 3.3"
    assert command(*words[:3], "figures=eps") == 1


@pytest.mark.parametrize("count", [1, 6, 45, 99, 700])
def test_the_training_loss_is_the_mean_that_its_label_names(count: int) -> None:
    values = np.random.default_rng(0).normal(size=count)
    series = Series(steps=np.arange(1.0, count + 1), values=values)
    of_the_end = min(-(-count // 10), series.window)
    assert series.last_window == of_the_end
    assert series.smoothed().values[-1] == pytest.approx(values[-of_the_end:].mean())
    assert smoothing(series).endswith(f"at most {series.window}")


def test_the_training_loss_is_one_number_in_the_terminal_and_the_table(small_run: Path) -> None:
    table = Comparison([small_run], lambda run: None)
    found = training_loss(small_run)
    assert found is not None and found.steps == 1, "of six steps"
    assert (
        found.loss
        == table.rows[0].train_loss
        == read_history(small_run).loss("train/loss").values[-1]
    )


def test_recipes_of_the_users_own_differ_only_where_they_differ(
    small_run: Path, tmp_path: Path
) -> None:
    operand = {"_target_": "fp4train.quantize.QuantSpec"}
    wide = {**operand, "block": [16, 16]}

    def recipe(label: str, first: dict[str, object]) -> dict[str, object]:
        pair = {"_target_": "fp4train.precision.Operands", "first": operand, "second": operand}
        table = {"fprop": {**pair, "first": first}, "dgrad": pair, "wgrad": pair}
        return {"_target_": "fp4train.precision.Custom", "label": label, **table}

    runs = [small_run]
    for label, first in (("mine", operand), ("theirs", wide)):
        run = Path(shutil.copytree(small_run, tmp_path / label))
        text = (run / "config.yaml").read_text("utf-8")
        body = yaml.safe_load(text)
        body["recipe"] = json.loads(json.dumps(recipe(label, first)))
        (run / "config.yaml").write_text(yaml.safe_dump(body), encoding="utf-8")
        runs.append(run)
    shown = Comparison(runs, lambda run: None).render()
    (line,) = [
        line for line in shown.splitlines() if line.startswith("the configurations differ in")
    ]
    assert line == "the configurations differ in recipe=NVFP4|mine|theirs"
