"""The comparison reports gaps that can be checked by hand."""

import math
from pathlib import Path

import pytest

from fp4train.analysis.compare import compare
from fp4train.errors import UserError
from fp4train.track import MetricsLog

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(
    run: Path, level: float, *, steps: range = range(1, 41), every: int = 10, recipe: str = "nvfp4", last: str = "bf16"
) -> Path:
    log = MetricsLog(run / "metrics.jsonl")
    for step in steps:
        values = {"train/loss": level, "perf/tokens_per_s": 1000.0 + step, "precision/recipe": recipe}
        log.log(step, {**values, "precision/recipe": last if step > 30 else recipe})
        if every and step % every == 0:
            log.log(step, {"val/loss": level + (0.5 if step == 10 else 0.0)})
    log.finish()
    return run


def test_the_table_gives_losses_and_the_gap_to_the_first(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", 2.0, recipe="bf16"), write_run(tmp_path / "b", 2.03)
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
    a, b = write_run(tmp_path / "a", 2.0), write_run(tmp_path / "b", 1.9, steps=range(1, 26))
    found = compare([a, b])
    assert found.step == 20 and found.rows[1].gap == pytest.approx(-0.05)
    assert "step 20 is the last with this loss in all of them" in found.render()


def test_without_common_validation_the_training_loss_decides(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", 2.0, every=0), write_run(tmp_path / "b", 2.2)
    found = compare([a, b])
    assert (found.key, found.step) == ("train/loss", 40) and found.rows[1].gap == pytest.approx(0.1)
    assert found.rows[0].val_loss is None and "training loss against a" in found.render()


def test_a_diverged_run_shows_as_nan_and_is_drawn(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", 2.0), write_run(tmp_path / "b", math.nan)
    found = compare([a, b])
    assert math.isnan(found.rows[1].train_loss) and found.rows[1].best_val_loss is None
    assert "nan" in found.render()
    assert found.draw().read_bytes().startswith(PNG)


def test_the_picture_goes_into_the_first_run_or_where_asked(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 2.0 + i / 50) for i, name in enumerate("abc")]
    assert compare(runs).draw() == tmp_path / "a" / "compare.png"
    out = compare(runs).draw(tmp_path / "pictures" / "all.png")
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
