"""The comparison reports gaps that can be checked by hand."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp4train.errors import UserError
from fp4train.lab.analysis import PICTURE, compare
from fp4train.lab.analysis.groups import gap_curve
from fp4train.track import MetricsLog


def write_run(
    run: Path, level: float, *, steps: range = range(1, 41), every: int = 10, recipe: str = "nvfp4"
) -> Path:
    """A run in two recipes, whose first validation loss is higher than the others."""
    log = MetricsLog(run / "metrics.jsonl")
    for step in steps:
        values = {"train/loss": level, "perf/tokens_per_s": 1000.0 + step}
        log.log(step, {**values, "precision/recipe": "bf16" if step > 30 else recipe})
        if every and step % every == 0:
            log.log(step, {"val/loss": level + (0.5 if step == 10 else 0.0)})
    log.finish()
    return run


def configured(run: Path, **values: object) -> Path:
    """The run with a configuration: section_key=value."""
    sections: dict[str, dict[str, object]] = {"run": {"name": run.name, "seed": 0}}
    for key, value in values.items():
        section, _, name = key.partition("_")
        sections.setdefault(section, {})[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(sections))
    return run


def test_the_table_gives_losses_and_the_gap_to_the_first(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", 2.0, recipe="bf16"), write_run(tmp_path / "b", 2.03)]
    comparison = compare(runs, lambda run: 0.0 if run == runs[0] else 0.834)
    first, second = comparison.rows
    assert comparison.at == ("val/loss", 40)
    assert first.gap is None and second.gap == pytest.approx(0.015)
    assert (first.train_loss, first.val_loss, first.best_val_loss) == pytest.approx((2.0, 2.0, 2.0))
    assert (first.recipe, second.recipe) == ("bf16", "nvfp4 → bf16")
    assert first.tokens_per_s == 1020.5 and first.steps == 40
    header, _, *rows = comparison.render().splitlines()[:4]
    assert header.endswith("gap  tokens/s") and header.split()[:3] == ["run", "recipe", "quantised"]
    assert " nothing " in rows[0] and " 83% " in rows[1] and rows[1].endswith("+1.50%     1,020")
    assert "validation loss against a at step 40" in comparison.render()


@pytest.mark.parametrize(
    ("first", "second", "at", "gap", "words"),
    [
        ({}, {"steps": range(1, 26)}, ("val/loss", 20), -0.05, "is the last with this loss in all"),
        ({"every": 0}, {}, ("train/loss", 40), -0.05, "training loss against a"),
        ({}, {"level": math.nan}, ("val/loss", 40), math.nan, "nan"),
    ],
    ids=["lengths", "no validation", "diverged"],
)
def test_runs_are_compared_at_the_last_step_that_all_have(
    tmp_path: Path,
    first: dict[str, Any],
    second: dict[str, Any],
    at: tuple[str, int],
    gap: float,
    words: str,
) -> None:
    runs = [
        write_run(tmp_path / "a", **{"level": 2.0, **first}),
        write_run(tmp_path / "b", **{"level": 1.9, **second}),
    ]
    comparison = compare(runs)
    assert comparison.at == at
    assert comparison.rows[1].gap == pytest.approx(gap, nan_ok=True)
    assert words in comparison.render()
    assert comparison.write(tmp_path / "a" / "compare.png").is_file()


def test_equal_losses_of_runs_of_other_lengths_have_no_gap(tmp_path: Path) -> None:
    """The mean over the last 80 steps of a falling loss is above that over the last 10."""
    runs = []
    for steps in (400, 4000):
        log = MetricsLog(tmp_path / str(steps) / "metrics.jsonl")
        for step in range(1, steps + 1):
            log.log(step, {"train/loss": 5 - step / 1000, "precision/recipe": "A"})
        log.finish()
        runs.append(tmp_path / str(steps))
    for named in (runs, runs[::-1]):
        comparison = compare(named)
        assert comparison.at == ("train/loss", 400) and comparison.rows[1].gap == 0
        assert not gap_curve(*comparison.groups, "train/loss").values.any()
    assert "mean of the last 10 to 80 steps; gap: training loss (mean of at most 10 steps)" in (
        compare(runs).render()
    )


def test_a_run_that_diverged_or_left_out_batches_is_named(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 2.0) for name in "abc"]
    for run, events in zip(
        runs, (["divergence"], ["divergence", "divergence over"], ["rewind"]), strict=True
    ):
        log = MetricsLog(run / "metrics.jsonl")
        for event in events:
            log.log_event(40, event)
        log.finish()
    text = compare(runs).render()
    assert "a: its loss diverged (step 40)" in text and "b: " not in text
    assert "c: it left out batches, as it went back to step 40" in text


def test_names_are_those_of_folders_their_paths_or_labels(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "run", 2.0) for parent in ("x", "y")]
    assert [row.run for row in compare(runs).rows] == [str(run) for run in runs]
    labelled = compare(runs, labels=("NVFP4", "MXFP8"))
    named = labelled.picture()(PICTURE).legends[0].get_texts()
    assert [text.get_text() for text in named][:2] == ["NVFP4", "MXFP8"]
    with pytest.raises(UserError, match="labels= names 1 runs of 2: give one for each run"):
        compare(runs, labels=("NVFP4",))


def test_each_mistake_has_its_message(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0)
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.jsonl").touch()
    late = write_run(tmp_path / "late", 2.0, steps=range(100, 120))
    for runs, message in (
        ([a, tmp_path / "nowhere"], r"nowhere is not a run directory \(it has no config.yaml\)"),
        ([a, tmp_path / "started"], "has no metrics yet"),
        ([a, late], "no step in common: a 1 to 40, late 100 to 119"),
    ):
        with pytest.raises(UserError, match=message):
            compare(runs)


def test_runs_that_differ_in_their_seed_only_are_averaged(tmp_path: Path) -> None:
    levels = {("a", 0): 1.9, ("a", 1): 2.0, ("a", 2): 2.1, ("b", 0): 2.0, ("b", 1): 2.2}
    runs = [
        configured(
            write_run(tmp_path / f"{name}{seed}", level), run_seed=seed, optim_lr=float(name == "a")
        )
        for (name, seed), level in levels.items()
    ]
    comparison = compare([*runs, configured(write_run(tmp_path / "c", 2.2), optim_lr=0.3)])
    a, b, single = comparison.means
    assert (a.runs, a.seeds, a.gap) == (("a0", "a1", "a2"), (0, 1, 2), None)
    assert (a.loss.mean, b.loss.mean) == pytest.approx((2.0, 2.1))
    assert a.loss.half_width() == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4), "t(2)"
    assert b.gap is not None and b.gap.mean == pytest.approx(0.05) and single.loss.error is None
    table = comparison.render()
    assert "2.0000 ± 0.2484" in table and "0 1 2" in table and "+5.00% ± " in table
    assert "seed by seed; a single seed has none" in table
    figure = comparison.picture()(PICTURE)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named[:3] == ["a0, a1, a2", "b0, b1", "c"]
    (mean,) = {round(y, 9) for y in figure.axes[0].lines[1].get_ydata()[1:]}
    assert mean == 2.0, "the validation losses of the seeds are averaged"
    written = json.loads(comparison.write(tmp_path / "means.json").read_text())
    assert written["means"][0]["seeds"] == [0, 1, 2]
    assert not compare([runs[0], runs[3]]).several_seeds, "other configurations are no seeds"
    labelled = compare(runs, labels=("A", "B"))
    rows = ["A, seed 0", "A, seed 1", "A, seed 2", "B, seed 0", "B, seed 1"]
    assert [row.run for row in labelled.rows] == rows
    assert [group.name for group in labelled.means] == ["A", "B"]
    assert "against A, seed 0 at step 40" in labelled.render()
    with pytest.raises(UserError, match="one for each run, or for each group of seeds"):
        compare(runs, labels=("A",))


def test_losses_at_different_steps_have_no_mean(tmp_path: Path) -> None:
    runs = [
        configured(write_run(tmp_path / f"a-seed={seed}", 2.0 - seed, steps=steps), run_seed=seed)
        for seed, steps in enumerate((range(1, 21), range(1, 31)))
    ]
    (group,) = compare(runs).means
    assert group.name == "a-seed=0, 1" and group.loss.mean == 1.5
    assert (group.train_loss, group.val_loss) == (None, None)
    assert "0 1    -  " in compare(runs).render()


def test_the_table_is_written_as_csv_and_as_json(tmp_path: Path) -> None:
    comparison = compare([write_run(tmp_path / "a", 2.0), write_run(tmp_path / "b", math.nan)])
    with comparison.write(tmp_path / "gap.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["run"], float(first["val_loss"]), first["gap"]) == ("a", 2.0, "")
    assert second["steps"] == "40"
    written = json.loads(comparison.write(tmp_path / "gap.json").read_text())
    assert (written["loss"], written["step"], written["means"]) == ("val/loss", 40, [])
    assert written["runs"][1]["val_loss"] is None
    for name, message in (
        ("x/gap.csv", "there is no folder"),
        ("gap.eps", "must end in .png or .svg or .pdf or .csv"),
    ):
        with pytest.raises(UserError, match=message):
            comparison.write(tmp_path / name)


@pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@a", "\t=1"])
def test_no_name_in_a_csv_file_is_a_formula_and_numbers_stay_numbers(
    tmp_path: Path, name: str
) -> None:
    runs = [write_run(tmp_path / "a", 2.0), write_run(tmp_path / name, 1.5, recipe=name)]
    with compare(runs).write(tmp_path / "gap.csv").open(newline="") as file:
        _, row = csv.DictReader(file)
    assert row["run"] == f"'{name}" and row["recipe"].startswith("'") and float(row["gap"]) == -0.25


def test_the_keys_in_which_configurations_differ_are_named(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 2.0) for name in "abcd"]
    shared = {"model_layers": 1, "optim_lr": 0.01, "train_steps": 40}
    a = configured(runs[0], **shared)
    b = configured(runs[1], **{**shared, "model_layers": 2, "optim_lr": 0.003})
    comparison = compare([a, b])
    assert comparison.differing == {"model.layers": [1, 2], "optim.lr": [0.01, 0.003]}
    said = "the configurations differ in model.layers=1|2, optim.lr=0.01|0.003"
    assert said in comparison.render()
    written = json.loads(comparison.write(tmp_path / "out.json").read_text())
    assert written["differing"] == comparison.differing
    assert not compare([a, runs[2]]).differing, "without a configuration nothing is known"
    assert "differ in" not in compare([a, configured(runs[3], **shared)]).render()


def test_sections_of_several_classes_differ_by_name_and_tokenizers_are_told(tmp_path: Path) -> None:
    a = configured(
        write_run(tmp_path / "a", 2.0),
        recipe__target_="fp4train.precision.NVFP4",
        recipe_hadamard=True,
        data_tokenizer={"_target_": "fp4train.data.tokenizers.Bytes"},
    )
    b = configured(
        write_run(tmp_path / "b", 2.2),
        recipe__target_="fp4train.precision.BF16",
        data_tokenizer={"_target_": "fp4train.data.tokenizers.ByteBPE"},
    )
    comparison = compare([a, b])
    assert "recipe=NVFP4|BF16" in comparison.render()
    assert "data.tokenizer=Bytes|ByteBPE" in comparison.render()
    assert "the tokenizers differ: a loss per token" in comparison.render()
    assert comparison.differing["recipe.hadamard"] == [True, "-"], "out=FILE.json has every key"
    assert "the tokenizers differ" not in compare([a, a]).render()
