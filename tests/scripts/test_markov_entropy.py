"""scripts/markov_entropy.py: the entropy that a DNA run is compared with."""

import importlib.util
import math
import random
import re
import shlex
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from configured import points_of

ROOT = Path(__file__).resolve().parents[2]
END = 256


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "markov_entropy", ROOT / "scripts" / "markov_entropy.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ids(*documents: str) -> np.ndarray:
    return np.array([code for each in documents for code in (*each.encode(), END)])


def by_definition(train: list[str], held_out: list[str], order: int) -> float:
    follows = Counter[tuple[str, str]]()
    total = 0.0
    bases = 0
    contexts = Counter[str]()
    for text in train:
        for at in range(order, len(text)):
            follows[text[at - order : at], text[at]] += 1
            contexts[text[at - order : at]] += 1
    for text in held_out:
        for at in range(order, len(text)):
            before = text[at - order : at]
            total -= math.log((follows[before, text[at]] + 0.5) / (contexts[before] + 4 * 0.5))
            bases += 1
    return total / bases


@pytest.mark.parametrize("order", [0, 1, 3])
def test_it_is_its_definition_within_documents(script: ModuleType, order: int) -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices("ACGT", (4, 2, 1, 1), k=length)) for length in (300, 2, 80, 90)]
    found = script.entropy(ids(*texts[:2]), ids(*texts[2:]), order, END)
    assert found == pytest.approx(by_definition(texts[:2], texts[2:], order), rel=1e-12)


def test_the_command_line_holds_out_what_a_run_holds_out(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In ACGTACGT… a base tells the next one."""
    (tmp_path / "a.fa").write_text(">a\n" + "ACGT" * 1000 + "\n")
    script.main([str(tmp_path / "a.fa"), "--orders", "0", "1", "--val", "400"])
    said = capsys.readouterr().out
    assert said.startswith(
        "3,601 training and 401 held-out tokens\norder 0: 1.3863 nats per base\norder 1: 0.00"
    )


def test_the_losses_of_a_run_are_drawn_beside_the_entropies(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"step": step, "train/loss": 2 / step} for step in range(1, 9)] + [
        {"step": 8, "event": "phase"}
    ]
    lines[3]["val/loss"] = 1.3
    monkeypatch.setattr(script, "read_metrics", lambda path: lines)
    script.draw(tmp_path, {0: 1.38, 5: 1.35}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_run_of_the_benchmark_is_as_short_and_as_far_below_the_markov_models_as_promised() -> (
    None
):
    """Its page may not be measured anew with a run that takes more than 180 s, or learns less than
    0.02 nats more.
    """
    page = (ROOT / "benchmarks" / "dna.md").read_text()
    entropies = {
        int(order): float(nats)
        for order, nats in re.findall(r"\| Markov, order (\d+).* \| ([\d.]+) \|", page)
    }
    (run,) = re.findall(r"in NVFP4, \d+ steps \| \*\*([\d.]+)\*\*", page)
    ((below, seconds),) = re.findall(
        r"ends ([\d.]+) nats per base below .* and (\d+) s of processor time", page
    )
    assert entropies[5] == min(entropies.values())
    assert (
        float(below) == pytest.approx(entropies[5] - float(run), abs=6e-4) and float(below) >= 0.02
    )
    assert int(seconds) <= 180


def test_the_commands_of_the_benchmark_are_valid() -> None:
    page = (ROOT / "benchmarks" / "dna.md").read_text()
    (command,) = re.findall(r"^fp4train (model=.*)$", page, re.MULTILINE)
    assert len(points_of(shlex.split(command))) == 1
    assert [
        line
        for line in re.findall(r"^python (\S+)", page, re.MULTILINE)
        if not (ROOT / line).is_file()
    ] == []
