"""Which verb a command is, what it prints for help, and the code that it exits with."""

import contextlib
import io
import logging
import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
from command_line import options_of
from tqdm import tqdm

import fp4train
from fp4train.cli import main
from fp4train.cli.main import USAGE, VERBS
from fp4train.errors import UserError
from fp4train.formats import ELEMENT_FORMATS
from fp4train.run.states import WEIGHT_KINDS


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that the screens of the verbs fit."""
    monkeypatch.setenv("COLUMNS", "120")


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


@cache
def help_of(*verb: str) -> str:
    """What `--help` prints: Hydra takes seconds to list every group."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert not run(*verb, "--help")
    return shown.getvalue()


def test_every_verb_has_a_file_of_its_name_and_a_line_in_the_usage() -> None:
    folder = Path(sys.modules["fp4train.cli"].__file__ or "").parent
    for verb in VERBS:
        assert (folder / f"{verb}.py").is_file()
        assert f"fp4train {verb}" in USAGE or verb == "train"


WITHOUT_OPTIONS = ("train", "formats", "recipes", "doctor")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_lists_its_own_options(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(verb)
    module = sys.modules[f"fp4train.cli.{verb}"]
    own = (module.__doc__ or "").strip()
    options = options_of(verb)
    assert bool(options) != (verb in WITHOUT_OPTIONS), "its class is named VERBOptions"
    assert shown.startswith(own) and own.startswith(
        f"fp4train {'[train]' if verb == 'train' else verb}"
    )
    assert max(map(len, own.splitlines())) <= 120
    body = own.partition("\n\n")[2]
    assert all(re.search(rf"(^  (.*  )?|[ ,]){key}(=|  )", body, re.MULTILINE) for key in options)
    assert not run("help", verb)
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("verb", ["export", "eval", "sample"])
def test_help_of_a_verb_that_takes_weights_lists_their_kinds(verb: str) -> None:
    shown = help_of(verb)
    assert all(f"\n  RUN:{kind} " in shown for kind in WEIGHT_KINDS)
    assert "{" not in shown


def test_help_alone_is_the_usage_and_of_no_verb_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not run("help")
    assert capsys.readouterr().out.startswith(USAGE)
    assert run("help", "pln") == 1
    assert "unknown key 'pln'; did you mean 'plan'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["comapre", "runs/a", "runs/b"], "unknown verb 'comapre'; did you mean 'compare'?"),
        (["re-port", "runs/a"], "unknown verb 're-port'; did you mean 'report'?"),
        (
            ["recipe=nvfp4", "extra"],
            "'extra' is no key=value; a verb stands first: fp4train help lists them",
        ),
    ],
)
def test_a_word_that_is_no_key_and_no_verb_is_told_so(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", [[], ["train"], ["plan"]])
def test_help_of_a_composed_verb_lists_groups_and_keys(verb: list[str]) -> None:
    shown = help_of(*verb)
    assert "  plugins=[] " in shown
    assert re.search(r"^  recipe  .*\n( {18}.*\n)* {18}.*nvfp4_plain", shown, re.MULTILINE)


def test_the_configuration_is_shown_with_an_own_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "house.yaml").write_text("defaults: [mxfp8, _self_]\nelement: hybrid\n")
    assert not run("--config-dir", str(tmp_path), "recipe=house", "--cfg", "job")
    assert "element: hybrid" in capsys.readouterr().out


def test_formats_lists_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("formats") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("format")
    for fmt in ELEMENT_FORMATS:
        assert re.search(rf"^{fmt.name} ", shown, re.MULTILINE), fmt.name


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"fp4train {fp4train.__version__}\n"


def test_an_error_is_one_message_and_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(
        "fp4train: compare needs two or more run directories"
    )


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

    monkeypatch.setattr("fp4train.cli.formats.main", told)
    run("formats")
    shown = "".join(capsys.readouterr())
    assert "a\\u001b]0;owned\\u0007b\\u009b2Jc\\rd\\u202ee\\u007f é✓\tend" in shown
    assert all(c.isprintable() or c in "\n\t\r" for c in shown) and ("\r" in shown) == (
        stream == "bar"
    )


def test_an_interrupt_before_the_loop_ends_with_128_and_its_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4train.cli.formats.main", interrupted)
    assert run("formats") == 130


def test_the_package_runs_as_a_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["fp4train", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fp4train", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert capsys.readouterr().out == f"fp4train {fp4train.__version__}\n"
