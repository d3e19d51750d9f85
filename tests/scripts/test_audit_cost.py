"""scripts/audit_cost.py: runs with and without audits take turns, and their medians become a table."""

import importlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from command_line import PATIENCE, TINY

from fp4train.cli import main

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("audit_cost")


def test_pairs_swap_their_order_and_medians_become_the_share(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = []

    def measured(*runs: Sequence[str]) -> list[object]:
        times = []
        for run in runs:
            without = "audit.every=0" in run
            ways.append(without)
            outlier = 50.0 if len(ways) == 2 else 0.0
            times.append(script.Times((10.0 if without else 10.1) + outlier, 20.0))
        return times

    monkeypatch.setattr(script, "measured", measured)
    out = tmp_path / "lines.md"
    assert script.script(["pairs=4", f"out={out}", "train.steps=200"]) == 0
    assert ways[1:] == [False, True, True, False] * 2, "after one that fills caches"
    text = out.read_text()
    assert "| with audits | 10.10 s | 20.00 s |" in text
    assert "| audits add | +1.00% | +0.00% |" in text
    assert "Medians of 4 runs each of `fp4train train.steps=200`" in text
    with pytest.raises(SystemExit, match="pairs=3: an even number"):
        script.script(["pairs=3"])


def test_the_commands_are_runs_with_the_default_audits_and_with_none(
    script: ModuleType, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.script(["dry=true", "recipe=mxfp8"]) == 0
    audited, plain = capsys.readouterr().out.splitlines()
    assert "audit." not in audited and "recipe=mxfp8" in audited
    assert plain.endswith("audit.every=0 audit.sums=0")
    data = (f"data.path={text}", f"data.cache_dir={tmp_path}")
    words = script.command(script.WITHOUT, tmp_path / "a", [*TINY, *data])
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words[3:]])
    assert not ended.value.code, "it is a run that fp4train takes"


TAKES_TURNS = f"""
import re, sys, time
from itertools import pairwise
from pathlib import Path

def turns():
    words = re.findall(r"^[ab]", Path(sys.argv[2]).read_text(), re.M)
    return sum(word != after for word, after in pairwise(words))

deadline = time.monotonic() + {PATIENCE}
while time.process_time() < 0.5: print(sys.argv[1], flush=True)
while turns() < 4 and time.monotonic() < deadline:
    print(sys.argv[1], flush=True)
    time.sleep(0.02)
"""
"""Runs for half a second of a processor, and on until there were so many turns: where whoever stops
it is late, a turn may take longer than that.
"""


def test_processes_are_timed_in_turn_and_one_that_fails_is_said(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SLICE", 0.1)
    program = tmp_path / "program.py"
    program.write_text(TAKES_TURNS)
    lines = tmp_path / "lines"
    shell = f"{sys.executable} {program} $0 {lines} >> {lines}"
    began = time.perf_counter()
    first, second = script.measured(["sh", "-c", shell, "a"], ["sh", "-c", shell, "b"])
    seconds = time.perf_counter() - began
    assert min(first.user, second.user) > 0.1
    assert min(first.wall, second.wall) > 0.4
    assert first.wall + second.wall <= seconds, "its own slices alone"
    words = re.findall(r"^[ab]", lines.read_text(), re.M)
    turns = sum(word != after for word, after in pairwise(words))
    assert turns >= 4, "neither ran while the other did"
    with pytest.raises(SystemExit, match=r"(?s)ended with 1:.*no memory"):
        script.measured([sys.executable, "-c", "raise RuntimeError('no memory')"])
