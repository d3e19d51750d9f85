"""docs/ranking.md: its commands run, its table has every key of `fp4train rank`, its shares are
those of the code.
"""

import re
import shlex
from pathlib import Path

import pytest
from shown import SMALL

from fp4train.cli import main
from fp4train.cli.rank import OPTIONS
from fp4train.lab.studies.base import RankRequest
from fp4train.lab.studies.intervals import quantile
from fp4train.lab.studies.sequential import ALPHA, needed, share

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "ranking.md").read_text(encoding="utf-8")
FEW = {"steps": "steps=2", "forks": "forks=1", "batches": "batches=1"}


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


@pytest.mark.long
def test_every_command_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(commands()) > 4
    for words in commands():
        # else no cooldown is in it
        few = [v for k, v in FEW.items() if not (k == "steps" and "schedule=own" in words)]
        short = [word for word in words if word.partition("=")[0] not in FEW]
        with pytest.raises(SystemExit) as ended:
            main([*short, *(few if words[0] == "rank" else SMALL)])
        assert ended.value.code == 0, shlex.join(words)


def test_the_table_has_every_key_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TEXT, re.MULTILINE))
    assert list(rows) and set(rows) == set(OPTIONS)
    defaults = {name: field.default for name, field in RankRequest.__dataclass_fields__.items()}
    for name in ("forks", "schedule", "margin", "processes"):
        assert rows[name] == str(defaults[name]).lower(), name


def test_the_shares_of_the_looks_are_those_of_the_code() -> None:
    words = " ".join(TEXT.split())
    shown = re.search(
        r"Look 1 has ([.\d]+) of the 5 %, look i has [^:]*: ([.\d, ]+), …; the sum is 1", words
    )
    assert shown is not None
    assert float(shown[1]) == share(1)
    assert [float(each) for each in shown[2].split(", ")] == [
        round(share(i), 3) for i in range(2, 5)
    ]
    first = re.search(r"A look needs ([\d, ]+), … forks", words)
    assert first is not None and [int(each) for each in first[1].split(", ")] == [
        needed(i) for i in range(1, 5)
    ]


def test_the_table_of_base_runs_is_that_of_the_code() -> None:
    """By t's quantiles, at the level of a first look and of ten comparisons."""
    rows = re.findall(r"^\| (\d) \| ([\d.]+) errors \| [^|]*t of (\d+)", TEXT, re.MULTILINE)
    assert [row[0] for row in rows] == ["2", "3", "4", "6"]
    for runs, errors, t in rows:
        assert float(errors) == round(quantile(0.95, int(runs) - 1), 1)
        assert int(t) == pytest.approx(quantile(1 - ALPHA * share(1) / 10, int(runs) - 1), rel=0.08)
