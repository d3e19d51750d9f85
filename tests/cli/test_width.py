"""Screens in a terminal of 80 columns: no line is longer, and no word is broken."""

import io
import re
import shutil
from pathlib import Path

import pytest
from command_line import TINY, besides
from lengths import long_but

from fp4train.cli import main
from fp4train.cli.main import VERBS
from fp4train.cli.output import message
from fp4train.config import own_options
from fp4train.text import columns, tabulate

COMMANDS = (
    ("plan",),
    ("plan", "full=true", "model.layers=2"),
    ("plan", "gpu=B200"),
    ("plan", "gpu=H100"),
    ("plan", "experiment=llama_125m_fineweb", "gpu=H100"),
    ("plan", "experiment=moe_30b_fineweb", "gpu=H100"),
    ("plan", "experiment=llama_8b_fineweb", "gpu=B200", "parallel.dp_shard=8"),
    ("plan", "experiment=llama_1b_fineweb", "gpu=B200", "parallel.dp_shard=8"),
    ("doctor",),
    ("formats",),
    ("recipes",),
    ("recipes", "nvfp4"),
    ("help", "compare"),
)
SHORT = [
    ("plan",),
    ("plan", "full=true", "model.layers=2"),
    ("plan", "gpu=B200"),
    ("plan", "gpu=H100"),
    ("plan", "experiment=llama_1b_fineweb", "gpu=B200", "parallel.dp_shard=8"),
    *(words for words in COMMANDS if words[0] in ("formats", "recipes", "help")),
]
"""Each form of a screen but `doctor`, whose file has a test of its width."""


def screen(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(list(words))
    return capsys.readouterr()


@pytest.mark.parametrize("words", long_but(SHORT, COMMANDS), ids=" ".join)
def test_a_screen_fits_80_columns_and_has_the_words_of_a_wide_one(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = screen(capsys, *words)[0]
    assert narrow and max(map(len, narrow.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "400")
    wide = screen(capsys, *words)[0]
    assert {word for word in narrow.split() if word.isalpha()} <= set(re.findall(r"[^\W_]+", wide))


@pytest.mark.usefixtures("sketched")
def test_runs_and_their_comparison_fit_80_columns(
    small_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in (("plan", str(small_run)), ("compare", str(small_run), str(small_run))):
        lines = [
            line
            for line in screen(capsys, *words)[0].splitlines()
            if str(small_run.parent) not in line
        ]
        assert lines and max(map(len, lines)) <= 80


COMMANDS_ON_A_RUN = (
    ("plan", "RUN"),
    ("plan", "RUN", "full=true"),
    ("swap", "RUN"),
    ("swap", "LOST"),
    ("swap", "RUN", "recipe=bf16", "at=3"),
    ("compare", "RUN", "OTHER"),
    ("compare", "RUN", "OTHER", "baseline=OTHER", "out=gap.csv"),
    ("report", "RUN", "OTHER"),
    ("eval", "RUN", "recipe=bf16,nvfp4", "batches=1", "DATA"),
    ("sample", "RUN", "prompt=a", "tokens=2"),
    ("export", "RUN", "to=hf", "out=exported"),
    ("sensitivity", "RUN", "batches=1", "repeats=1", "DATA"),
    ("rank", "RUN", "recipe=bf16,mxfp8", "forks=2", "steps=1", "batches=1", "DATA"),
    ("gate", "RUN", "recipe=mxfp8", "margin=1", "forks=2", "steps=1", "batches=1", "DATA"),
    ("compare", "RUN", "OTHER", "margin=0.01"),
    ("resume=RUN",),
    ("resume=RUN", "train.batch_size=3"),
    ("recipe=nvpf4",),
    ("plan", "train.stepz=3"),
    ("compare", "RUN", "nowhere"),
    ("export", "RUN", "to=nothing"),
    ("report", "RUN", "stepz=3"),
)
"""Commands on a finished run, also such as are refused."""


def fits(line: str) -> bool:
    """Whether a line has at most 80 columns, but for a word that is longer, such as a path."""
    return len(line) <= 80 or len(line.split()) == 1


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize("words", COMMANDS_ON_A_RUN, ids=" ".join)
def test_what_commands_on_a_run_print_fits_80_columns(
    words: tuple[str, ...],
    small_run: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("first", "a_second_run_with_a_longer_name-seed=3-lr=0.003", "lost"):
        shutil.copytree(small_run, name)
    Path("lost/history.jsonl").unlink()
    places = {
        "RUN": "first",
        "LOST": "lost",
        "OTHER": "a_second_run_with_a_longer_name-seed=3-lr=0.003",
        "DATA": f"data.path={text}",
    }
    printed = screen(
        capsys,
        *(
            places.get(
                word, word.replace("=RUN", "=first").replace("=OTHER", f"={places['OTHER']}")
            )
            for word in words
        ),
    )
    lines = "\n".join(printed).splitlines()
    assert lines and not [line for line in lines if not fits(line)]


def test_what_a_training_run_prints_fits_80_columns(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    words = besides(TINY, ["audit.every"])
    printed = screen(
        capsys, *words, f"data.path={text}", "run.name=a_run_with_a_name", "run.seed=1"
    )
    lines = "\n".join(printed).replace("\r", "\n").splitlines()
    assert lines and not [line for line in lines if not fits(line)]


@pytest.mark.parametrize("topic", [*VERBS, *own_options()])
def test_help_fits_80_columns(
    topic: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = screen(capsys, "help", topic)[0].splitlines()
    assert lines and max(map(len, lines)) <= 80


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_what_goes_on_in_help_is_indented(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("help", verb) if verb else ("--help",)
    usage, _, examples = screen(capsys, *words)[0].partition("\n\n")
    assert [line for line in usage.splitlines()[1:] if not line.startswith("    ")] == []
    if not verb:
        lines = examples.partition("\n\n")[0].splitlines()
        assert {line[:8] for line in lines} == {"fp4train", "torchrun", " " * 8}
        columns_of = {len(line) - len(line.lstrip()) for line in lines if line.startswith(" ")}
        assert columns_of == {44}


def test_a_message_in_a_file_stays_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "a word " * 40
    monkeypatch.delenv("COLUMNS")
    assert message(long, io.StringIO()) == long
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, message(long, io.StringIO()).splitlines())) <= 80


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
