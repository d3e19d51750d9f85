"""benchmarks/NAME.md is the table of NAME.json, and pages that name its figures have them from there."""

import json
from pathlib import Path
from typing import Any

import benchmark_report
import pytest

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "epyc_2_cores.json"
OVER_BF16 = "an NVFP4 step over a BF16 step"
FIGURES = {
    "README.md": {
        f"default run: {OVER_BF16}": "| one training step of the default run (1.2 M "
        "parameters) | {:.2f}× |",
        f"llama_125m, 2048 tokens: {OVER_BF16}": "| one training step of `llama_125m`, 2048 "
        "tokens | {:.2f}× |",
        "NVFP4 linear forward + backward, 2048 tokens, 2048→2048, over BF16 nn.Linear": (
            "| one linear layer, 2048 tokens, 2048→2048, forward and backward | {:.2f}× |"
        ),
    },
    "docs/hybrid.md": {
        f"hybrid of width 768, 2048 tokens: {OVER_BF16}": "width 768 with 2048 tokens in emulated "
        "NVFP4 takes {:.2f} times one in BF16",
    },
    "docs/moe.md": {
        f"moe_tiny: {OVER_BF16}": "A step of `moe_tiny` in emulated NVFP4 takes {:.2f} times one "
        "in BF16"
    },
}
"""Row of the measurement → what a page says of it."""


def rows() -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in json.loads(MEASURED.read_text())["rows"]}


def test_the_table_is_that_of_the_figures() -> None:
    measured = json.loads(MEASURED.read_text())
    page = MEASURED.with_suffix(".md").read_text(encoding="utf-8")
    assert page == benchmark_report.Report(rows=measured["rows"]).markdown(measured["machine"])


@pytest.mark.parametrize(
    ("page", "row"), [(page, row) for page, sentences in FIGURES.items() for row in sentences]
)
def test_a_page_says_what_was_measured(page: str, row: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert FIGURES[page][row].format(rows()[row]["value"]) in text


def test_a_part_that_is_measured_again_leaves_the_others(tmp_path: Path) -> None:
    machine = {"machine": "a"}
    first = benchmark_report.Report(out=tmp_path / "a")
    first.add("one", [1.0, 3.0, 2.0], 1.0)
    first.add("two", 2.0)
    first.write(machine)
    again = benchmark_report.Report(out=tmp_path / "a")
    again.go_on(machine)
    again.add("one", 0.5, 1.0)
    again.add("three", 3.0)
    values = [(row["what"], row["value"], row["met"]) for row in again.rows]
    assert values == [("one", 0.5, True), ("two", 2.0, None), ("three", 3.0, None)]
    with pytest.raises(ValueError, match="is of machine b, and this is a"):
        first.write({"machine": "b"})
        again.go_on(machine)
