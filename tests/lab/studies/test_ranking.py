"""What a ranking says of its forks: order, gaps, floor, words, and its file."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fp4train.lab.studies import (
    Base,
    Entry,
    Fork,
    ForkSettings,
    Ranking,
    RankResult,
)
from fp4train.lab.studies.ranking import render
from fp4train.lab.studies.results import bound

GAPS = {"bf16": 0.0, "mxfp8": 0.0009, "nvfp4": 0.006, "nvfp4_plain": 0.006, "mxfp4": 0.009}


def base(run: str) -> Base:
    settings = ForkSettings(steps=24, schedule="linear", lr=3e-3, batches=8)
    return Base(
        source=Path(run),
        step=200,
        settings=settings,
        run=run,
        trained="NVFP4",
        targets=(16384, 16384),
    )


def ranking(
    forks: int, gaps: dict[str, float] | None = None, runs: int = 1, **changes: object
) -> Ranking:
    """Gaps and scatter as they were measured on the default run; `forks` at each of the runs."""
    rng = random.Random(0)
    gaps = GAPS if gaps is None else gaps
    common = [1.76 + rng.gauss(0, 0.01) for _ in range(forks * runs)]

    def entry(name: str, gap: float, scatter: float, asked: bool = True) -> Entry:
        losses = [c + gap + rng.gauss(0, scatter) for c in common]
        made = [
            Fork(
                recipe=x,
                high=x - gap / 2,
                train=x,
                problem=None,
                seconds=7.0,
                parts=[x - gap / 4, x + gap / 4],
            )
            for x in losses
        ]
        return Entry(
            name=name,
            key=f"k-{name}",
            forks=made,
            asked=asked,
            same=["BF16"] if name == "bf16" else [],
        )

    entries = [entry(name, gap, 0.0004) for name, gap in gaps.items()]
    entries += [
        entry(name, -1e-4, 3e-5, asked=False)
        for name in ("BF16", "FP32")
        if name.lower() not in gaps
    ]
    look = 1 if forks * runs >= 6 else None
    bases = [base(f"runs/{'abcdef'[i]}") for i in range(runs)]
    found = Ranking(
        bases=bases, entries=entries, margin=5e-4, look=look, first_reference=entries[0].key
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def test_the_table_gives_the_order_the_gaps_and_what_is_told_apart() -> None:
    found = ranking(12)
    text = render(found)
    assert [entry.name for entry in found.ranked][:2] == ["bf16", "mxfp8"] and found.ranked[
        -1
    ].name == "mxfp4"
    verdicts = {frozenset((pair.first, pair.second)): pair.verdict for pair in found.pairs}
    assert verdicts[frozenset(("nvfp4", "mxfp4"))] == "here"
    assert verdicts[frozenset(("nvfp4", "nvfp4_plain"))] == "open"
    assert (
        "sign flips of 12 forks, corrected for 10 comparisons of all 5 candidates in the record\n"
        in text
    )
    assert (
        "look 1 at this record has 80.0% of the 5%" in text
        and "one checkpoint: all of this holds for it" in text
    )
    same = found.groups["nvfp4"]
    assert same == found.groups["nvfp4_plain"] and not set(same) & set(found.groups["mxfp4"])
    assert len(text.splitlines()) < 30 and max(map(len, text.splitlines())) < 130


def test_a_gap_is_the_mean_of_the_differences_of_the_same_seeds() -> None:
    found = ranking(6)
    nvfp4 = next(entry for entry in found.entries if entry.name == "nvfp4")
    differences = [
        a - b for a, b in zip(nvfp4.losses("recipe"), found.reference.losses("recipe"), strict=True)
    ]
    assert found.gap(nvfp4).mean == pytest.approx(sum(differences) / 6, rel=1e-12)
    assert found.gap(nvfp4).count == 6
    assert found.gap(nvfp4, "high").mean < found.gap(nvfp4).mean


def test_the_floor_is_there_whatever_the_reference_is() -> None:
    found = ranking(6, {"nvfp4": 0.006, "mxfp4": 0.009})
    assert found.reference.name == "nvfp4" and found.floor is not None
    assert [entry.name for entry in found.ranked] == ["nvfp4", "mxfp4"], (
        "what nobody asked for is not ranked"
    )
    assert len(found.pairs) == 1 and "floor of the noise: FP32 − BF16 = " in render(found)


def test_a_reference_that_is_not_the_best_has_better_ones_before_it() -> None:
    found = ranking(12, {"mxfp4": 0.009, "bf16": 0.0})
    better = next(entry for entry in found.entries if entry.name == "bf16")
    assert found.ranked[0] is better and found.gap(better).mean < 0
    assert found.groups == {"bf16": "a", "mxfp4": "b"}


@pytest.mark.parametrize("forks", [1, 2, 6, 12])
def test_a_ranking_is_read_back_as_it_was_written(forks: int) -> None:
    """Without a test, and of one fork without an interval, too."""
    result = RankResult.of(ranking(forks))
    text = json.dumps(asdict(result), allow_nan=False)
    assert json.dumps(asdict(bound(json.loads(text), RankResult))) == text
    first, second, *_ = result.results
    assert (first.name, first.gap, first.verdict) == ("bf16", None, None)
    assert second.gap is not None and (second.gap.error is None) == (forks == 1)
    assert (second.verdict is None) == (second.simultaneous is None) == (forks < 6)
    if forks == 12:
        assert second.verdict == "here"


def test_the_interval_with_all_pairs_is_that_of_the_gap_to_the_reference() -> None:
    """A pair names the better candidate first; where that is not the reference, its difference has
    the other sign.
    """
    found = ranking(12, {"mxfp4": 0.009, "bf16": 0.0})
    (pair,) = found.pairs
    assert pair.first == "bf16" and pair.simultaneous is not None
    low, high = pair.simultaneous
    best, _ = RankResult.of(found).results
    assert best.name == "bf16" and best.simultaneous == (-high, -low)
    assert best.gap is not None and -high < best.gap.mean < -low < 0


def test_what_is_not_told_apart_names_the_forks_to_go_on_with() -> None:
    text = render(ranking(6, {"nvfp4": 0.006, "nvfp4_plain": 0.006}, margin=0.0, next_look=2))
    assert "1 of 1 pairs are not told apart: forks=12 goes on, as the next look" in text


def test_several_base_runs_have_their_spread_in_the_interval_and_each_its_gap() -> None:
    """A candidate whose gap depends on the base run: the forks are clear, the base runs are not."""
    found = ranking(8, {"bf16": 0.0, "nvfp4": 0.005}, runs=3)
    shift = [0.001, 0.004, -0.002]
    moved = [
        replace(fork, recipe=(fork.recipe or 0) + shift[i // 8]) if fork else None
        for i, fork in enumerate(found.entries[1].forks)
    ]
    entries = [found.entries[0], replace(found.entries[1], forks=moved), *found.entries[2:]]
    wide = replace(found, entries=entries)
    text = render(replace(found, entries=entries))
    narrow = found.gap(found.entries[1])
    halves = wide.gap(entries[1])
    assert narrow.freedom == halves.freedom == 2 and (halves.error or 0) > 10 * (narrow.error or 1)
    assert [pair.verdict for pair in found.pairs] == ["different"] and [
        pair.verdict for pair in wide.pairs
    ] == ["here"]
    assert (
        "3 checkpoints of 3 base runs: the spread between runs is in ±" in text
        and "told apart here" in text
    )
    assert "gap at each checkpoint\nnvfp4  +0.006" in text and "4.3 errors of the mean of 3" in text
    assert len(RankResult.of(wide).results[1].gaps) == 3


def test_the_order_in_which_checkpoints_are_named_makes_no_other_test() -> None:
    """24 forks have a subgroup of the sign patterns; a candidate that was not asked for has forks
    at one of three.
    """
    found = ranking(8, {"bf16": 0.0, "mxfp8": 2e-4, "nvfp4": 3e-4}, runs=3)

    def turned(forks: Sequence[Fork | None]) -> list[Fork | None]:
        return [*forks[16:], *forks[8:16], *forks[:8]]

    asked = found.entries[:2]
    hidden = found.entries[2]
    hidden = replace(hidden, forks=[*hidden.forks[:8], *[None] * 16])
    found = replace(found, entries=[*asked, found.entries[-1]], unasked=[hidden])
    entries, others = (
        [replace(e, forks=turned(e.forks)) for e in each] for each in (found.entries, found.unasked)
    )
    other = replace(found, bases=found.bases[::-1], entries=entries, unasked=others)
    assert found.table == other.table
    assert [pair.p for pair in found.compared] == [pair.p for pair in other.compared]


def test_the_choice_of_validation_tokens_is_said_beside_the_interval() -> None:
    """By hand: microbatches with gaps of ½ and 3/2 of the mean have the error gap/2; t(1) is
    12.7.
    """
    found = ranking(6)
    nvfp4 = next(entry for entry in found.entries if entry.name == "nvfp4")
    assert found.sampling(nvfp4) == pytest.approx(12.7062 * 0.006 / 4, rel=1e-4)
    assert "± tokens: beside it, for the choice of the 32,768 validation tokens" in render(found)
    by_their_targets = [replace(found.bases[0], targets=(12288, 20480))]
    assert replace(found, bases=by_their_targets).sampling(nvfp4) == pytest.approx(0, abs=1e-3)
    bare = [
        replace(entry, forks=[replace(f, parts=[1.0]) for f in entry.forks if f])
        for entry in found.entries
    ]
    assert replace(found, entries=bare).sampling(bare[2]) is None
