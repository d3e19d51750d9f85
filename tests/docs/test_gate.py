"""docs/gate.md: its commands run, its table has every key of `fp4train gate`, its numbers are those
of the code.
"""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import simulate_gate as simulated
from shown import SMALL, commands

from fp4train.cli import main
from fp4train.cli.gate import OPTIONS
from fp4train.lab.gate.betting import BOUND, decide, rounds_needed
from fp4train.lab.gate.result import ASSUMED, EXIT_CODES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_every_command_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _, *words in commands("gate.md"):
        few = {"gate": ("steps=1", "batches=1", "processes=1"), "compare": ()}.get(words[0], SMALL)
        with pytest.raises(SystemExit) as ended:
            main([*words, *few])
        assert ended.value.code in ((0, 2) if words[0] == "gate" else (0,)), shlex.join(words)


def test_the_table_has_every_key() -> None:
    cells = re.findall(r"^\| (`[^|]+`) \|", TEXT, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(OPTIONS)


def test_the_exit_codes_are_those_of_the_command() -> None:
    rows = re.findall(r"^\| (within|beyond|undecided) \| (\d) \|", TEXT, re.MULTILINE)
    assert {verdict: int(code) for verdict, code in rows} == EXIT_CODES


def test_the_numbers_of_forks_are_those_of_the_code() -> None:
    rows = re.findall(r"^\+(0.\d+) +(?:within|beyond) +(\d+)$", TEXT, re.MULTILINE)
    assert len(rows) == 4
    for gap, pairs in rows:
        seeds = rounds_needed(float(gap), ASSUMED * 0.01, 0.01, BOUND * 0.01)
        assert seeds is not None and 2 * seeds == int(pairs)
    (pairs,) = re.findall(r"and (\d+) forks miss\s+it in 2 % of all cases", TEXT)
    assert decide(np.zeros((60, 1)), 0.01, BOUND * 0.01).rounds == int(pairs)
    (pairs,) = re.findall(r"`bound=0.03` at the margin .01, equal recipes need (\d+) pairs", TEXT)
    assert decide(np.zeros((60, 1)), 0.01, 0.03).rounds == int(pairs)


def test_the_table_of_errors_has_every_kind_of_the_script_and_what_it_prints() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\.?0?\.\d+) \| (0\.\d+) \|$", TEXT, re.MULTILINE)
    assert {name for name, *_ in rows} == set(simulated.NOISE)
    for name, within, beyond in rows:
        assert max(float(within), float(beyond)) <= 0.05
        for shown, rate in zip((within, beyond), simulated.errors_of(name, 800, 300), strict=True):
            assert abs(float(shown) - rate) < 0.03, name


def test_what_it_says_of_checkpoints_that_share_seeds_is_what_the_script_prints() -> None:
    pattern = r"^Two and four checkpoints, .* within at most (0\.\d+), false beyond (0\.\d+)\.$"
    (shown,) = re.findall(pattern, TEXT, re.MULTILINE)
    worst = simulated.errors_of_dependent("lognormal, 2.2", 2, 1.0, 800, 300)
    assert abs(float(shown[0]) - worst[0]) < 0.03 and float(shown[0]) <= 0.05
    worst = simulated.errors_of_dependent("lognormal downwards, 2.2", 4, 1.0, 800, 300)
    assert abs(float(shown[1]) - worst[1]) < 0.03 and float(shown[1]) <= 0.05
