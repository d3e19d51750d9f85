"""Curves are drawn from any metrics that a run can write, using its directory only."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest

from fp4train.errors import UserError
from fp4train.lab.analysis import PICTURE, History, compare
from fp4train.lab.analysis.curves import BAND, draw_curves
from fp4train.lab.analysis.figure import common_look
from fp4train.lab.analysis.history import Series
from fp4train.track import MetricsLog

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(run: Path, lines: list[dict[str, Any]]) -> Path:
    log = MetricsLog(run / "metrics.jsonl")
    for line in lines:
        step = line.pop("step")
        if "event" in line:
            log.log_event(step, line.pop("event"), line)
        else:
            log.log(step, line)
    log.finish()
    return run


def whole_run(steps: int = 60) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        recipe = "nvfp4" if step <= 30 else "mxfp8" if step <= 50 else "bf16"
        if step in (31, 51):
            lines.append({"step": step, "event": "swap", "recipe": recipe})
        values = {"train/loss": 2 + 3 / step, "train/lr": 1e-3, "train/grad_norm": 1 / step}
        lines.append({"step": step, **values, "precision/recipe": recipe})
        if step % 20 == 0:
            lines.append({"step": step, "val/loss": 2.1, "val/loss_recipe": 2.2})
    return lines


@pytest.mark.long
def test_a_whole_run_is_drawn_with_its_recipes_and_what_happened(tmp_path: Path) -> None:
    lines = whole_run()
    lines += [{"step": 2, "event": "audit", "layer": "head"}, {"step": 6, "event": "audit fault"}]
    run = write_run(tmp_path / "run", lines)
    path = draw_curves(run)
    assert path == run / "curves.png" and path.read_bytes().startswith(PNG)
    assert sorted(p.name for p in run.iterdir()) == ["curves.png", "metrics.jsonl"]
    figure = compare([run]).picture()(PICTURE)
    assert [text.get_text() for text in figure.axes[0].texts] == ["swap", "swap", "audit fault"]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["validation in the recipe", "run", "nvfp4", "mxfp8", "bf16"]
    assert [axes.get_title(loc="left") for axes in figure.axes[2:]] == [
        "learning rate",
        "gradient norm",
    ]


def test_the_shares_of_a_mixture_are_drawn_under_its_losses(tmp_path: Path) -> None:
    lines = whole_run()
    for step, share in ((20, 0.75), (40, 0.75), (60, 0.0)):
        lines.append({"step": step, "data/share/b": 1 - share, "data/share/a": share})
    lines.append({"step": 50, "event": "stage", "b": 1.0})
    figure = compare([write_run(tmp_path / "run", lines)]).picture()(PICTURE)
    losses, shares = figure.axes[:2]
    assert "stage" in [text.get_text() for text in losses.texts]
    assert shares.get_title(loc="left") == "shares of the parts of the data"
    drawn = {line.get_label(): list(line.get_ydata()) for line in shares.lines[:2]}
    assert drawn == {"a": [0.75, 0.75, 0.0], "b": [0.25, 0.25, 1.0]}


def test_in_a_column_of_a_paper_curves_keep_their_room_and_the_band_of_seeds_a_name(
    tmp_path: Path,
) -> None:
    runs = [
        made.write_run(
            tmp_path / f"llama_tiny-{recipe}-seed={seed}", level, seed=seed, recipe=recipe
        )
        for recipe in ("bf16", "nvfp4")
        for seed, level in enumerate((2.0, 2.1))
    ]
    with common_look():
        figure = compare(runs).picture()(3.3)
        figure.draw_without_rendering()
    loss, _, recipes = figure.axes
    assert loss.get_window_extent().width > 0.75 * figure.bbox.width
    assert [label.get_text() for label in recipes.get_yticklabels()] == ["■", "■"]
    assert figure.get_tightbbox().x1 < 3.35
    assert all(float(tick).is_integer() for tick in recipes.get_xticks())
    named = [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]
    assert named.count(BAND) == 1
    with common_look():
        (legend,) = compare(runs, labels=("bf16", "nvfp4")).picture()(3.3).legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named.count("bf16") == 2, "a curve and a recipe"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([{"step": 0, "train/loss": 5.5}], marks=pytest.mark.long),
        [
            {"step": 1, "train/loss": 5.5},
            {"step": 2, "train/loss": math.nan},
            {"step": 3, "train/loss": math.inf},
        ],
        pytest.param([{"step": s, "train/loss": math.nan} for s in (1, 2)], marks=pytest.mark.long),
        [{"step": s, "train/loss": 0.0, "train/grad_norm": 0.0} for s in (1, 2, 3)],
        [
            {"step": s, "train/loss": 2.0, "val/loss": math.nan, "precision/recipe": "$r_{" * 20}
            for s in (1, 2, 3)
        ],
        pytest.param(
            [{"step": 5, "event": "resume"}, {"step": 6, "train/loss": 2.0}], marks=pytest.mark.long
        ),
    ],
    ids=["step zero", "diverged", "nan from the start", "zeros", "long name", "events first"],
)
def test_odd_runs_are_drawn_too(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    assert draw_curves(write_run(tmp_path / "run$_{$", lines)).read_bytes().startswith(PNG)


def test_bands_follow_the_recipe_also_where_a_resume_logged_a_step_twice() -> None:
    recipes = ["a", "a", "b", "b", "a"]
    lines = [{"step": s, "precision/recipe": r} for s, r in enumerate(recipes, start=1)]
    history = History(path=Path("run"), lines=[*lines, lines[2], {"step": 3, "event": "resume"}])
    assert history.bands() == [(0, 2, "a"), (2, 4, "b"), (4, 5, "a")]


def test_smoothing_is_the_trailing_mean_and_hides_no_nan() -> None:
    values = np.random.default_rng(0).normal(size=1000)
    series = Series(steps=np.arange(1000.0), values=values)
    smooth = series.smoothed().values
    assert series.window == series.last_window == 20
    assert smooth[0] == values[0] and smooth[50] == pytest.approx(values[45:51].mean())
    assert smooth[-1] == pytest.approx(values[-20:].mean())
    values[500] = np.nan
    smooth = series.smoothed().values
    assert np.isnan(smooth[500:520]).all()
    assert np.isfinite(smooth[520:]).all() and np.isfinite(smooth[:500]).all()


def test_a_huge_loss_leaves_the_means_after_it_alone() -> None:
    values = np.concatenate([[1e34, 1e12, 700.0], np.linspace(4, 1, 200)])
    smooth = Series(steps=np.arange(203.0), values=values).smoothed(10).values
    own = [values[number - 9 : number + 1].mean() for number in range(150, 203)]
    np.testing.assert_allclose(smooth[150:], own, rtol=1e-12)


def test_what_is_no_run_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="nowhere is not a run directory"):
        draw_curves(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no metrics yet"):
        draw_curves(write_run(tmp_path, [{"step": 1, "event": "resume"}]))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 2.0}) + "\n")
    with pytest.raises(UserError, match="is of an older fp4train"):
        draw_curves(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        draw_curves(write_run(tmp_path / "run", whole_run()))
