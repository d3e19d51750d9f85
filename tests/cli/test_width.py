"""Screens in a terminal of 80 columns: no line is longer, and no word is broken."""

import io
import shutil
from pathlib import Path

import pytest
from command_line import TINY, Cli, Outcome, besides

from fp4train.cli.main import VERBS
from fp4train.cli.output import message
from fp4train.config import own_options
from fp4train.text import columns, tabulate

COMMANDS = (
    ("plan",),
    ("plan", "full=true", "model.layers=2"),
    ("plan", "gpu=H100"),
    ("plan", "experiment=llama_1b_fineweb", "gpu=B200", "parallel.dp_shard=8"),
    ("formats",),
    ("recipes",),
    ("recipes", "nvfp4"),
)
COMMANDS_ON_A_RUN = (
    ("plan", "RUN"),
    ("swap", "RUN"),
    ("compare", "RUN", "OTHER"),
    ("report", "RUN", "OTHER"),
    ("eval", "RUN", "recipe=bf16,nvfp4", "batches=1", "DATA"),
    ("resume=RUN",),
    ("plan", "train.stepz=3"),
    ("compare", "RUN", "nowhere"),
)
"""Commands on a finished run, also such as are refused."""


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


def too_long(ended: Outcome) -> list[str]:
    """Lines of more than 80 columns, but for a word that is longer, such as a path."""
    lines = (ended.out + ended.err).replace("\r", "\n").splitlines()
    assert lines
    return [line for line in lines if len(line) > 80 and len(line.split()) > 1]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_screen_fits_80_columns(cli: Cli, words: tuple[str, ...]) -> None:
    assert not too_long(cli.raw(*words))


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize("words", COMMANDS_ON_A_RUN, ids=" ".join)
def test_what_commands_on_a_run_print_fits_80_columns(
    cli: Cli, words: tuple[str, ...], small_run: Path
) -> None:
    other = "a_second_run_with_a_longer_name-seed=3-lr=0.003"
    for name in ("first", other):
        shutil.copytree(small_run, name)
    places = {"RUN": "first", "OTHER": other, "DATA": f"data.path={cli.text}"}
    named = (places.get(word, word.replace("=RUN", "=first")) for word in words)
    assert not too_long(cli.raw(*named))


def test_what_a_training_run_prints_fits_80_columns(cli: Cli) -> None:
    words = besides(TINY, ["audit.every"])
    paths = (f"data.path={cli.text}", "run.name=a_run_with_a_name", "run.seed=1")
    assert not too_long(cli.raw(*words, *paths))


@pytest.mark.parametrize("topic", [*VERBS, *own_options()])
def test_help_fits_80_columns(cli: Cli, topic: str) -> None:
    assert not too_long(cli.raw("help", topic))


def test_a_message_in_a_file_stays_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a word " * 40
    assert max(map(len, message(long, io.StringIO()).splitlines())) <= 80
    monkeypatch.delenv("COLUMNS")
    assert message(long, io.StringIO()) == long


def test_cells_fold_between_words_and_numbers_keep_their_column() -> None:
    rows = [("run", "recipe", "steps"), ("a", "NVFP4 with fprop in BF16", "60"), ("b", "x", "3")]
    assert tabulate(rows, right={2}, width=22) == [
        "run recipe       steps",
        "─── ──────────── ─────",
        "a   NVFP4 with      60",
        "    fprop in",
        "    BF16",
        "b   x                3",
    ]
    step = [("step", "together as planned"), ("all", "12.3 ms (41%)")]
    assert tabulate(step, right={1}, width=20)[:3] == [
        "step     together as",
        "             planned",
        "──── ───────────────",
    ]
    assert columns(rows, width=80) == columns(rows)
    assert columns([("a_name-of=a.run" * 2, "12345")], right={1}, width=24) == [
        "a_name-of=a.runa_  12345",
        "name-of=a.run",
    ]
