"""What a ranking says of its forks: order, gaps, floor, words, JSON without infinities, and a picture of it."""

import json
import random
from dataclasses import replace

import pytest

from fp4train.analysis.curves import save_figure
from fp4train.studies.forks import Fork, ForkSettings
from fp4train.studies.ranking import Entry, Ranking
from fp4train.studies.ranking_picture import picture

GAPS = {"bf16": 0.0, "mxfp8": 0.0009, "nvfp4": 0.006, "nvfp4_plain": 0.006, "mxfp4": 0.009}


def ranking(forks: int, gaps: dict[str, float] | None = None, **changes: object) -> Ranking:
    """Gaps and scatter as they were measured on the default run."""
    rng = random.Random(0)
    gaps = GAPS if gaps is None else gaps
    common = [1.76 + rng.gauss(0, 0.01) for _ in range(forks)]

    def entry(name: str, gap: float, scatter: float, asked: bool = True) -> Entry:
        losses = [c + gap + rng.gauss(0, scatter) for c in common]
        made = [Fork(recipe=x, high=x - gap / 2, train=x, problem=None, seconds=7.0) for x in losses]
        return Entry(name=name, forks=made, asked=asked, same=["BF16"] if name == "bf16" else [])

    entries = [entry(name, gap, 0.0004) for name, gap in gaps.items()]
    entries += [entry(name, -1e-4, 3e-5, asked=False) for name in ("BF16", "FP32") if name.lower() not in gaps]
    settings = ForkSettings(steps=24, schedule="linear", lr=3e-3, batches=8)
    found = Ranking(run="runs/a", step=200, settings=settings, entries=entries, margin=5e-4, most=forks)
    return replace(found, **changes)  # type: ignore[arg-type]


def test_the_table_gives_the_order_the_gaps_and_what_is_told_apart() -> None:
    found = ranking(12)
    text = found.render()
    assert [entry.name for entry in found.ranked][:2] == ["bf16", "mxfp8"] and found.ranked[-1].name == "mxfp4"
    verdicts = {frozenset((pair.first, pair.second)): pair.verdict for pair in found.pairs}
    assert verdicts[frozenset(("nvfp4", "mxfp4"))] == "apart"
    assert verdicts[frozenset(("nvfp4", "nvfp4_plain"))] != "apart"
    assert "corrected for 10 comparisons and for looks after 4, 6, 8, 12 forks" in text
    same = found.groups["nvfp4"]
    assert same == found.groups["nvfp4_plain"] and not set(same) & set(found.groups["mxfp4"])
    assert len(text.splitlines()) < 30 and max(map(len, text.splitlines())) < 130


def test_a_gap_is_the_mean_of_the_differences_of_the_same_seeds() -> None:
    found = ranking(6)
    nvfp4 = next(entry for entry in found.entries if entry.name == "nvfp4")
    differences = [a - b for a, b in zip(nvfp4.losses("recipe"), found.reference.losses("recipe"), strict=True)]
    assert found.gap(nvfp4).mean == pytest.approx(sum(differences) / 6, rel=1e-12)
    assert found.gap(nvfp4).count == 6
    assert found.gap(nvfp4, "high").mean < found.gap(nvfp4).mean


def test_the_floor_is_there_whatever_the_reference_is() -> None:
    found = ranking(6, {"nvfp4": 0.006, "mxfp4": 0.009})
    assert found.reference.name == "nvfp4" and found.floor is not None
    assert [entry.name for entry in found.ranked] == ["nvfp4", "mxfp4"], "what nobody asked for is not ranked"
    assert len(found.pairs) == 1 and "floor of the noise: FP32 − BF16 = " in found.render()


def test_a_reference_that_is_not_the_best_has_better_ones_before_it() -> None:
    found = ranking(12, {"mxfp4": 0.009, "bf16": 0.0})
    better = next(entry for entry in found.entries if entry.name == "bf16")
    assert found.ranked[0] is better and found.gap(better).mean < 0
    assert found.groups == {"bf16": "a", "mxfp4": "b"}


def test_json_has_no_number_that_json_lacks() -> None:
    for forks in (1, 2, 4):
        plain = ranking(forks).plain()
        again = json.loads(json.dumps(plain, allow_nan=False))
        assert again["pairs"][0]["together"] == ([None, None] if forks < 4 else plain["pairs"][0]["together"])
        assert (again["candidates"][1]["gap"]["low"] is None) == (forks == 1)


def test_what_is_not_told_apart_names_the_forks_to_go_on_with() -> None:
    text = ranking(6, {"nvfp4": 0.006, "nvfp4_plain": 0.006}, margin=0.0).render()
    assert "1 of 1 pairs are not told apart: forks=12 goes on" in text


def test_the_picture_has_a_row_per_candidate_and_intervals_in_view(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = ranking(6)
    figure = picture(found)
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [entry.name for entry in found.ranked]
    low, high = axes.get_xlim()
    for entry in found.ranked:
        interval = found.gap(entry).interval()
        assert interval is not None and low < interval[0] <= interval[1] < high
    assert save_figure(figure, tmp_path / "rank.png").stat().st_size > 10_000
    save_figure(picture(ranking(1)), tmp_path / "one.png")
