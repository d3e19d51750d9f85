"""Which verb a command is, what it prints for help, and the code that it exits with."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

import fp4train
from fp4train.cli import main, rank, report, sensitivity
from fp4train.cli.main import USAGE, VERBS
from fp4train.errors import UserError


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_every_verb_has_a_file_of_its_name_and_a_line_in_the_usage() -> None:
    folder = Path(sys.modules["fp4train.cli"].__file__ or "").parent
    for verb, task in VERBS.items():
        assert (folder / f"{verb}.py").is_file() and task.__module__ == f"fp4train.cli.{verb}"
        assert f"fp4train {verb}" in USAGE or verb == "train"


@pytest.mark.parametrize("verb", ["swap", "compare", "formats", "doctor"])
def test_help_of_a_verb_that_is_not_composed_is_the_usage(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert capsys.readouterr().out == USAGE


@pytest.mark.parametrize(
    ("verb", "keys"),
    [
        ("sensitivity", [*sensitivity.OPTIONS, "recipe", "step", "gpu"]),
        ("rank", [*rank.OPTIONS, "recipe", "policy", "phases", "plugins"]),
        ("report", report.OPTIONS),
    ],
)
def test_help_of_a_verb_with_options_of_its_own_lists_each(
    verb: str, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(verb, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"fp4train {verb} RUN") and max(map(len, shown.splitlines())) <= 120
    body = shown.partition("\n\n")[2]
    assert all(re.search(rf"^  (.*  )?{key}=", body, re.MULTILINE) for key in keys)


@pytest.mark.parametrize("verb", [[], ["plan"]])
def test_help_of_a_composed_verb_lists_groups_and_keys(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert not run(*verb, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith(USAGE) and "plugins: []" in shown
    assert any(line.startswith("recipe: ") and "nvfp4_plain" in line for line in shown.splitlines())


def test_the_configuration_is_shown_with_an_own_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "house.yaml").write_text("defaults: [mxfp8, _self_]\nelement: hybrid\n")
    assert not run("--config-dir", str(tmp_path), "recipe=house", "--cfg", "job")
    assert "element: hybrid" in capsys.readouterr().out


def test_formats_lists_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("formats") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("format") and all(name in shown for name in ("e2m1", "e4m3", "e5m2", "e3m2", "e2m3"))


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"fp4train {fp4train.__version__}\n"


def test_an_error_is_one_message_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("fp4train: compare needs two or more run directories")


@pytest.mark.parametrize("stream", ["out", "err", "log", "message", "bar"])
def test_nothing_that_is_printed_acts_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: str
) -> None:
    hostile = "a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\x7f é✓\tend"

    def told(arguments: list[str]) -> int:
        if stream == "log":
            logging.getLogger("fp4train").warning("name %s", hostile)
        elif stream == "message":
            raise UserError(hostile)
        elif stream == "bar":
            for _ in tqdm([1], desc=hostile):
                pass
        else:
            print(hostile, file=getattr(sys, f"std{stream}"))
        return 0

    monkeypatch.setitem(VERBS, "formats", told)
    run("formats")
    shown = "".join(capsys.readouterr())
    assert "a\\u001b]0;owned\\u0007b\\u009b2Jc\\rd\\u202ee\\u007f é✓\tend" in shown
    assert all(c.isprintable() or c in "\n\t\r" for c in shown) and ("\r" in shown) == (stream == "bar")


def test_an_interrupt_before_the_loop_ends_with_128_and_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "formats", interrupted)
    assert run("formats") == 130


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fp4train", "--version"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True)
    assert done.stdout == f"fp4train {fp4train.__version__}\n"
