"""docs/ranking.md: its commands run, its tables are those of the code."""

import shlex
from pathlib import Path

import pytest
from shown import commands, in_tenths, shortened, table

from fp4train.cli import main
from fp4train.config.command_line import option_names
from fp4train.lab.intervals import quantile
from fp4train.lab.studies import ALPHA, RankRequest
from fp4train.lab.studies.sequential import needed, share

PAGE = "ranking.md"
FEW = {"steps": "steps=2", "forks": "forks=1", "batches": "batches=1"}


@pytest.mark.long
def test_every_command_works(working_folder: Path) -> None:
    found = commands(PAGE)
    assert len(found) > 4
    for _, *shown in found:
        words = in_tenths(shown, ("step", "checkpoint.every"))
        if words[0] == "rank":
            # else no cooldown is in it
            few = [v for k, v in FEW.items() if not (k == "steps" and "schedule=own" in words)]
            words = [*(word for word in words if word.partition("=")[0] not in FEW), *few]
        else:
            words = shortened(words)
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, shlex.join(words)


def test_the_table_has_every_key_and_its_default() -> None:
    rows = {key.strip("`"): default for key, default, _ in table(PAGE, "key")}
    assert set(rows) == set(option_names(RankRequest))
    defaults = {name: field.default for name, field in RankRequest.__dataclass_fields__.items()}
    for name in ("forks", "schedule", "margin", "processes"):
        assert rows[name] == str(defaults[name]).lower(), name


def test_the_table_of_base_runs_is_that_of_the_code() -> None:
    """By t's quantiles, at the level of a first look and of ten comparisons."""
    one_run, *rows = table(PAGE, "base runs")
    assert one_run[0] == "1" and [row[0] for row in rows] == ["2", "3", "4", "6"]
    for runs, interval, told_apart in rows:
        errors = float(interval.removesuffix(" errors"))
        t = int(told_apart.partition("t of ")[2].rstrip(")"))
        assert errors == round(quantile(0.95, int(runs) - 1), 1)
        assert t == pytest.approx(quantile(1 - ALPHA * share(1) / 10, int(runs) - 1), rel=0.08)


def test_the_table_of_looks_is_that_of_the_code() -> None:
    rows = table(PAGE, "look")
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    for look, shown, forks in rows:
        digits = len(shown.partition(".")[2])
        assert float(shown) == round(share(int(look)), digits)
        assert int(forks) == needed(int(look))
