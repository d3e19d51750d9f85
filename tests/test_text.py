"""Tables line up, and a slip is answered with what was meant."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from fp4train.text import (
    check_choice,
    columns,
    counted,
    counted_are,
    near_miss,
    nearest,
    screen,
    short,
    span,
    step_span,
    tabulate,
    whole_number,
    with_unit,
)

ROWS = [("run", "loss"), ("a", "1.25"), ("longer", "12.5")]


def test_columns_are_as_wide_as_their_widest_cell_and_end_without_blanks() -> None:
    assert columns(ROWS) == ["run     loss", "a       1.25", "longer  12.5"]
    assert columns([("a", "bc", ""), ("abc", "d", "e")]) == ["a    bc", "abc  d   e"]


def test_numbers_end_together() -> None:
    assert columns([("a", "1"), ("b", "100")], right=[1]) == ["a    1", "b  100"]


def test_a_table_underlines_its_header_alone() -> None:
    assert tabulate(iter(ROWS))[:2] == ["run     loss", "──────  ────"] and len(tabulate(ROWS)) == 4


def test_nothing_is_a_table_of_no_lines() -> None:
    assert columns([]) == [] and tabulate([("a", "b")]) == ["a  b", "─  ─"]


def test_rows_of_different_length_are_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="shorter"):
        columns([("a", "b"), ("a",)])


@pytest.mark.parametrize(
    ("word", "meant"), [("nvfp5", "nvfp4"), ("NVFP4", "nvfp4"), ("bf61", "BF16"), ("x", None)]
)
def test_the_near_miss_is_found_whatever_its_case(word: str, meant: str | None) -> None:
    assert nearest(word, ["nvfp4", "mxfp8", "BF16"]) == meant


def test_a_hint_is_said_only_where_there_is_one() -> None:
    assert (
        near_miss("nvfp5", ["nvfp4"]) == "; did you mean 'nvfp4'?"
        and near_miss("x", ["nvfp4"]) == ""
    )


def test_a_choice_names_key_value_what_is_allowed_and_the_near_miss() -> None:
    check_choice("error", None, (None, "mae", "mse"))
    with pytest.raises(
        ValueError, match=r"^error='mae2' is not one of None, mae, mse; did you mean 'mae'\?$"
    ):
        check_choice("error", "mae2", (None, "mae", "mse"))
    with pytest.raises(ValueError, match=r"^size=3 is not one of 1, 2$"):
        check_choice("size", 3, (1, 2))


def test_a_cell_stays_in_its_row_and_shows_what_a_terminal_would_act_on() -> None:
    assert tabulate([("a", "b"), ("x\ny", "\x1b[1m")]) == [
        "a     b",
        "────  ─────────",
        "x\\ny  \\u001b[1m",
    ]


def test_a_whole_number_is_one_that_any_place_can_hold() -> None:
    assert [whole_number(each) for each in ("0", "12", "9" * 18)] == [0, 12, 10**18 - 1]
    assert not any(map(whole_number, ("", "-1", "1.0", "9" * 19, "9" * 5000, "²", "1\n")))


def test_a_column_without_any_text_is_a_column_without_width() -> None:
    """A sweep whose points need no note has such a column, and a narrow screen folds its table."""
    assert tabulate([("run", ""), ("a long name of a run", "")], width=12)[0].startswith("run")


def test_rows_stand_below_the_headings_that_they_share() -> None:
    rows = [("GEMM", "time"), ("fprop", "1 ms"), ("all three of them", "2 ms"), ("fprop", "3 ms")]
    assert tabulate(rows, right={1}, width=16, indent="  ", headings=("", "wq", "wq", "wk")) == [
        "  GEMM      time",
        "  ───────── ────",
        "wq",
        "  fprop     1 ms",
        "  all three 2 ms",
        "  of them",
        "wk",
        "  fprop     3 ms",
    ]


def test_a_number_agrees_with_its_noun() -> None:
    assert [counted(number, "step") for number in (0, 1, 2, 1234)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,234 steps",
    ]
    assert (counted(1, "batch", "batches"), counted(2, "batch", "batches")) == (
        "1 batch",
        "2 batches",
    )
    assert (counted_are(1, "line"), counted_are(3, "line")) == ("1 line is", "3 lines are")
    assert (span(3, 4), span(3, 10)) == ("3", "3–9")
    assert (step_span(0, 1), step_span(0, 10)) == ("step 0", "steps 0–9")


@given(st.floats(min_value=1, max_value=1e17), st.sampled_from([3, 4]))
def test_amounts_have_no_exponent_and_keep_their_digits(number: float, digits: int) -> None:
    powers = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
    count, _, letter = short(number, digits).partition(" ")
    amount, _, unit = with_unit(number, "B", digits).partition(" ")
    assert "e" not in f"{count}{amount}" and unit.endswith("B")
    for text, prefix in ((count, letter), (amount, unit.removesuffix("B"))):
        value = float(text.replace(",", "")) * powers[prefix]
        assert value == pytest.approx(number, rel=0.51 * 10.0 ** (1 - digits))


def test_counts_are_in_billions_and_bytes_in_gigabytes() -> None:
    assert [short(n) for n in (12, 999.6, 6.98e9, 1e12)] == ["12", "1 k", "6.98 B", "1 T"]
    assert short(405_853_388_800, 4) == "405.9 B"
    assert [with_unit(n, "B") for n in (0, 96, 7020, 1.21e12)] == [
        "0 B",
        "96 B",
        "7.02 kB",
        "1.21 TB",
    ]


def test_a_name_with_a_newline_makes_no_line_of_its_own_on_a_screen() -> None:
    """Neither a folder nor what a check of a run quotes."""
    folder = Path("runs/a\nstep 3: all is well")
    subject = SimpleNamespace(title=str(folder), step=3)
    checked = SimpleNamespace(audits=[], faults=["wgrad of a\nb"], uncovered={"c\nd": "e\nf"})
    assert screen("fp4train.cli", "check.txt", subject=subject, checked=checked).splitlines() == [
        "runs/a\\nstep 3: all is well, step 3: 0 GEMMs of 0 layers compared with the reference, "
        "1 fault",
        "wgrad of a\\nb",
        "not covered: c\\nd: e\\nf",
    ]
    values = {"history": "history.jsonl", "swaps": [], "requests": {}, "done": 2, "width": 80}
    (line,) = screen("fp4train.cli", "swaps.txt", run=folder, lost=True, **values).splitlines()
    assert line.startswith("runs/a\\nstep 3: all is well/history.jsonl is missing or empty")
