"""The comparison reports gaps that can be checked by hand."""

import csv
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from fp4train.cli.output import fitted, terminal_width
from fp4train.errors import UserError
from fp4train.lab.analysis import PICTURE, compare
from fp4train.lab.analysis.figure import colour_of, line_of
from fp4train.lab.analysis.groups import gap_at, gap_curve
from fp4train.track import MetricsLog

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(
    run: Path,
    level: float,
    *,
    steps: range = range(1, 41),
    every: int = 10,
    recipe: str = "nvfp4",
    last: str = "bf16",
) -> Path:
    log = MetricsLog(run / "metrics.jsonl")
    for step in steps:
        values = {
            "train/loss": level,
            "perf/tokens_per_s": 1000.0 + step,
            "precision/recipe": recipe,
        }
        log.log(step, {**values, "precision/recipe": last if step > 30 else recipe})
        if every and step % every == 0:
            log.log(step, {"val/loss": level + (0.5 if step == 10 else 0.0)})
    log.finish()
    return run


def test_the_table_gives_losses_and_the_gap_to_the_first(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0, recipe="bf16")
    b = write_run(tmp_path / "b", 2.03)
    found = compare([a, b])
    first, second = found.rows
    assert (found.key, found.step) == ("val/loss", 40)
    assert first.gap is None and second.gap == pytest.approx(0.015)
    assert (first.train_loss, first.val_loss, first.best_val_loss) == pytest.approx((2.0, 2.0, 2.0))
    assert (first.recipe, second.recipe) == ("bf16", "nvfp4 → bf16")
    assert first.tokens_per_s == 1020.5 and first.steps == 40
    text = found.render()
    assert "+1.50%" in text and "validation loss against a at step 40" in text and "1,020" in text
    assert "differ in length" not in text
    table = [line for line in text.splitlines() if not line.startswith("train loss")]
    assert {line.index("+1.50%") + 6 for line in table if "+1.50%" in line} == {
        line.index(" gap") + 4 for line in table if " gap" in line
    }, "columns are aligned"


def test_runs_of_different_length_are_compared_at_the_last_common_step(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0)
    b = write_run(tmp_path / "b", 1.9, steps=range(1, 26))
    found = compare([a, b])
    assert found.step == 20 and found.rows[1].gap == pytest.approx(-0.05)
    assert "step 20 is the last with this loss in all of them" in found.render()


def test_without_common_validation_the_training_loss_decides(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0, every=0)
    b = write_run(tmp_path / "b", 2.2)
    found = compare([a, b])
    assert (found.key, found.step) == ("train/loss", 40) and found.rows[1].gap == pytest.approx(0.1)
    assert found.rows[0].val_loss is None and "training loss against a" in found.render()


def test_a_diverged_run_shows_as_nan_and_is_drawn(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0)
    b = write_run(tmp_path / "b", math.nan)
    found = compare([a, b])
    assert math.isnan(found.rows[1].train_loss) and found.rows[1].best_val_loss is None
    assert "nan" in found.render()
    assert found.draw().read_bytes().startswith(PNG)


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
    assert (
        "a: its loss diverged (step 40)" in text
        and "c: it left out batches, as it went back to step 39" in text
    )
    assert "b: " not in text


def test_the_picture_goes_into_the_first_run_or_where_asked(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 2.0 + i / 50) for i, name in enumerate("abc")]
    assert compare(runs).draw() == tmp_path / "a" / "compare.png"
    (tmp_path / "pictures").mkdir()
    out = compare(runs).write(tmp_path / "pictures" / "all.png")
    assert out.read_bytes().startswith(PNG) and len(list(out.parent.iterdir())) == 1


def test_one_run_alone_and_one_twice_can_be_looked_at(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0)
    assert compare([a]).draw().exists()
    assert compare([a, a]).rows[1].gap == 0.0


def test_runs_of_one_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "run", 2.0) for parent in ("x", "y")]
    assert [row.name for row in compare(runs).rows] == [str(run) for run in runs]


def test_each_mistake_has_its_message(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0)
    with pytest.raises(UserError, match="fp4train compare RUN RUN"):
        compare([])
    with pytest.raises(UserError, match="nowhere is not a run directory: there is no such folder"):
        compare([a, tmp_path / "nowhere"])
    with pytest.raises(UserError, match=r"it has no metrics.jsonl"):
        compare([a, tmp_path])
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="has no metrics yet"):
        compare([a, tmp_path / "started"])
    late = write_run(tmp_path / "late", 2.0, steps=range(100, 120))
    with pytest.raises(UserError, match="no step in common: a 1 to 40, late 100 to 119"):
        compare([a, late])
    with pytest.raises(UserError, match=r"compare\.png cannot be written"):
        compare([a]).draw(a / "metrics.jsonl" / "compare.png")


def seeded(run: Path, level: float, seed: int, **config: object) -> Path:
    path = write_run(run, level)
    (path / "config.yaml").write_text(
        json.dumps({"run": {"name": run.name, "seed": seed}, **config})
    )
    return path


def test_runs_that_differ_in_their_seed_only_are_averaged(tmp_path: Path) -> None:
    runs = [
        seeded(tmp_path / f"a{seed}", level, seed, lr=1)
        for seed, level in enumerate((1.9, 2.0, 2.1))
    ]
    runs += [
        seeded(tmp_path / f"b{seed}", level, seed, lr=2) for seed, level in enumerate((2.0, 2.2))
    ]
    found = compare(runs)
    a, b = found.means
    assert (a.runs, a.seeds, a.gap) == (("a0", "a1", "a2"), (0, 1, 2), None)
    assert (a.loss.mean, b.loss.mean) == pytest.approx((2.0, 2.1))
    assert a.loss.half_width() == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4), "t(2)"
    assert b.gap is not None and b.gap.mean == pytest.approx(0.05)
    shown = found.render()
    assert "2.0000 ± 0.2484" in shown and "0 1 2" in shown and "+5.00% ± " in shown
    figure = found.picture()(PICTURE)
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == [
        "a0, a1, a2",
        "b0, b1",
    ]
    (mean,) = {round(y, 9) for y in figure.axes[0].lines[1].get_ydata()[1:]}
    assert mean == 2.0, "the validation losses of the seeds are averaged"
    assert compare([runs[0], runs[3]]).means == [], (
        "other configurations are not seeds of each other"
    )


def test_a_single_seed_beside_a_group_has_no_interval(tmp_path: Path) -> None:
    runs = [seeded(tmp_path / f"a{seed}", 2.0 + seed, seed, lr=1) for seed in (0, 1)]
    comparison = compare([*runs, seeded(tmp_path / "b", 2.2, 0, lr=2)])
    table = comparison.render()
    assert "2.5000 ± 6.3531" in table and "2.2000  2.2000" in " ".join(table.split(" " * 10))
    assert "seed by seed; a single seed has none" in table
    assert "a single seed" not in compare(runs).render()
    written = json.loads(comparison.write(tmp_path / "means.json").read_text())
    assert written["means"][1]["loss"]["mean"] == pytest.approx(2.2)
    assert written["means"][1]["loss"]["error"] is None


@pytest.mark.parametrize(
    ("lengths", "averaged"),
    [
        ((1, 5), "train loss: the last step;"),
        ((1, 12), "train loss: mean of the last 1 to 2 steps;"),
        ((40, 12), "train loss: mean of the last 2 to 4 steps;"),
        ((40, 40), "train loss: mean of the last 4 steps;"),
    ],
)
def test_the_steps_that_training_losses_are_means_of_are_those_of_all_runs(
    tmp_path: Path, lengths: tuple[int, ...], averaged: str
) -> None:
    runs = [
        write_run(tmp_path / f"run{number}", 2.0, steps=range(1, length + 1), every=0)
        for number, length in enumerate(lengths)
    ]
    assert averaged in compare(runs).render()


@pytest.mark.parametrize("shift", [-0.5, 0.5])
def test_the_picture_shows_validation_losses_beyond_the_training_losses(
    tmp_path: Path, shift: float
) -> None:
    runs = [write_run(tmp_path / name, 2.0 + index / 50) for index, name in enumerate("ab")]
    for run in runs:
        log = MetricsLog(run / "metrics.jsonl")
        log.log(40, {"val/loss": 2.0 + shift})
        log.finish()
    panel = compare(runs).picture()(PICTURE).axes[0]
    low, high = panel.get_ylim()
    assert low < 2.0 + shift < high


def test_the_table_is_written_as_csv_and_as_json(tmp_path: Path) -> None:
    runs = [seeded(tmp_path / "a", 2.0, 0), seeded(tmp_path / "b", math.nan, 1)]
    found = compare(runs)
    with found.write(tmp_path / "gap.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (
        first["run"] == "a"
        and float(first["val_loss"]) == 2.0
        and first["gap"] == ""
        and second["steps"] == "40"
    )
    written = json.loads(found.write(tmp_path / "gap.json").read_text())
    assert (written["loss"], written["step"]) == ("val/loss", 40) and written["runs"][1][
        "val_loss"
    ] is None
    assert written["means"][0]["seeds"] == [0, 1]
    for name, message in (
        ("x/gap.csv", "there is no folder"),
        ("gap.eps", "must end in .png or .svg or .pdf or .csv"),
    ):
        with pytest.raises(UserError, match=message):
            found.write(tmp_path / name)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["=1+1", "+a", "-a", "@a", "\t=1"])
def test_no_name_in_a_csv_file_is_a_formula_and_numbers_stay_numbers(
    tmp_path: Path, name: str
) -> None:
    found = compare(
        [write_run(tmp_path / "a", 2.0), write_run(tmp_path / name, 1.5, every=0, recipe=name)]
    )
    with found.write(tmp_path / "gap.csv").open(newline="") as file:
        _, row = csv.DictReader(file)
    assert row["run"] == f"'{name}" and row["recipe"].startswith("'") and float(row["gap"]) == -0.25


def test_24_runs_are_told_apart_in_table_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    name = "llama_tiny-nvfp4-hadamard=false-stochastic_rounding=true-lr=0.0"
    runs = [write_run(tmp_path / f"{name}{i:02}", 2.0 + i / 50) for i in range(24)]
    found = compare(runs)
    lines = fitted(found.render(terminal_width())).splitlines()
    assert max(map(len, lines)) <= 120 and not [line for line in lines if "…" in line]
    assert all(sum(line.startswith(run.name) for line in lines) >= 2 for run in runs), (
        "its numbers and its recipe"
    )
    assert len({(colour_of(i), str(line_of(i))) for i in range(24)}) == 24
    assert found.draw().read_bytes().startswith(PNG)


def test_two_comparisons_at_once_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    found = compare([write_run(tmp_path / name, 2.0) for name in "ab"])
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(found.write, [tmp_path / "gap.json"] * 20))
    assert (
        set(written) == {tmp_path / "gap.json"} and json.loads(written[0].read_text())["step"] == 40
    )
    assert [p.name for p in tmp_path.glob(".*")] == []


def configured(run: Path, **values: object) -> Path:
    sections: dict[str, dict[str, object]] = {"run": {"name": run.name, "seed": 0}}
    for key, value in values.items():
        section, _, name = key.partition("_")
        sections.setdefault(section, {})[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(sections))
    return run


def test_the_keys_in_which_configurations_differ_are_named(tmp_path: Path) -> None:
    a = configured(
        write_run(tmp_path / "a", 2.0),
        model_layers=1,
        model_width=32,
        optim_lr=0.01,
        train_steps=40,
    )
    b = configured(
        write_run(tmp_path / "b", 2.2),
        model_layers=2,
        model_width=64,
        optim_lr=0.003,
        train_steps=40,
    )
    found = compare([a, b])
    assert found.differing == {
        "model.layers": [1, 2],
        "model.width": [32, 64],
        "optim.lr": [0.01, 0.003],
    }
    assert (
        "the configurations differ in model.layers=1|2, model.width=32|64, optim.lr=0.01|0.003"
        in found.render()
    )
    assert json.loads(found.write(tmp_path / "out.json").read_text())["differing"][
        "model.layers"
    ] == [1, 2]
    c = write_run(tmp_path / "c", 2.2)
    assert not compare([a, c]).differing, "without a configuration nothing is known"
    d = configured(
        write_run(tmp_path / "d", 2.2),
        model_layers=1,
        model_width=32,
        optim_lr=0.01,
        train_steps=40,
    )
    assert "differ in" not in compare([a, d]).render()


def test_recipes_of_several_classes_differ_by_name_and_not_by_the_options_of_one(
    tmp_path: Path,
) -> None:
    a = configured(
        write_run(tmp_path / "a", 2.0),
        recipe__target_="fp4train.precision.NVFP4",
        recipe_hadamard=True,
        train_steps=30,
    )
    b = configured(
        write_run(tmp_path / "b", 2.2), recipe__target_="fp4train.precision.BF16", train_steps=40
    )
    found = compare([a, b])
    assert (
        "the configurations differ in recipe=NVFP4|BF16, train.steps=30|40\n"
        in found.render() + "\n"
    )
    assert found.differing["recipe.hadamard"] == [True, "-"], "out=FILE.json has every key"


def test_what_was_quantised_stands_beside_the_recipe(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", 2.0)
    b = write_run(tmp_path / "b", 2.2)
    lines = compare([a, b], lambda run: 0.0 if run == b else 0.834).render().splitlines()
    assert lines[0].split()[:3] == ["run", "recipe", "quantised"]
    assert " 83%" in lines[2] and " nothing" in lines[3]


def test_equal_losses_of_runs_of_other_lengths_have_no_gap(tmp_path: Path) -> None:
    """The mean over the last 80 steps of a falling loss is above that over the last 10."""
    runs = []
    for steps in (400, 4000):
        log = MetricsLog(tmp_path / str(steps) / "metrics.jsonl")
        for step in range(1, steps + 1):
            log.log(step, {"train/loss": 5 - step / 1000, "precision/recipe": "A"})
        log.finish()
        runs.append(tmp_path / str(steps))
    short_and_long = compare(runs)
    assert (short_and_long.key, short_and_long.step) == ("train/loss", 400)
    assert short_and_long.rows[1].gap == 0
    long_and_short = compare(runs[::-1])
    assert long_and_short.rows[1].gap == 0
    assert long_and_short.losses == short_and_long.losses
    assert "gap: training loss (mean of at most 10 steps) against 400" in short_and_long.render()
    first, second = compare(runs).groups
    assert gap_at(first, second, "train/loss", 400).mean == 0
    assert not gap_curve(first, second, "train/loss").values.any()


def test_losses_per_token_of_other_tokenizers_are_named_no_measure(tmp_path: Path) -> None:
    tokenizers = {"a": "fp4train.data.tokenizers.Bytes", "b": "fp4train.data.tokenizers.ByteBPE"}
    for name, target in tokenizers.items():
        run = write_run(tmp_path / name, 2.0)
        configuration = {"data": {"tokenizer": {"_target_": target}}, "run": {"seed": 0}}
        (run / "config.yaml").write_text(yaml.safe_dump(configuration))
    a, b = tmp_path / "a", tmp_path / "b"
    assert "the tokenizers differ: a loss per token" in compare([a, b]).render()
    assert "the tokenizers differ" not in compare([a, a]).render()
