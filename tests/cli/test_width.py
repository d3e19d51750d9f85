"""Screens in a terminal of 80 columns: no line is longer, and no word is broken."""

from pathlib import Path

import pytest

from fp4train.cli import main
from fp4train.text import columns, tabulate

COMMANDS = (
    ("plan",),
    ("plan", "full=true", "model.layers=2"),
    ("plan", "gpu=B200"),
    ("plan", "gpu=H100", "gpus=8", "parallel=auto", "model=llama_1b"),
    ("plan", "experiment=llama_8b_fineweb", "gpu=B200", "parallel.dp_shard=8"),
    ("doctor",),
    ("formats",),
    ("help", "compare"),
)


def screen(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(list(words))
    return capsys.readouterr()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_screen_fits_80_columns_and_has_the_words_of_a_wide_one(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = screen(capsys, *words)[0]
    assert narrow and max(map(len, narrow.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "400")
    wide = screen(capsys, *words)[0]
    assert {word for word in narrow.split() if word.isalpha()} <= set(wide.split())


def test_runs_and_their_comparison_fit_80_columns(
    small_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (("plan", str(small_run)), ("compare", str(small_run), str(small_run))):
        lines = [line for line in screen(capsys, *words)[0].splitlines() if str(small_run.parent) not in line]
        assert lines and max(map(len, lines)) <= 80


def test_cells_fold_between_words_and_numbers_keep_their_column() -> None:
    rows = [("run", "recipe", "steps"), ("a", "NVFP4 with fprop in BF16", "60"), ("b", "x", "3")]
    assert tabulate(rows, right={2}, width=22) == [
        "run  recipe      steps",
        "───  ──────────  ─────",
        "a    NVFP4 with     60",
        "     fprop in",
        "     BF16",
        "b    x               3",
    ]
    assert columns(rows, width=80) == columns(rows)
    assert columns([("a_name-of=a.run" * 2, "12345")], right={1}, width=24) == [
        "a_name-of=a.runa_  12345",
        "name-of=a.run",
    ]
