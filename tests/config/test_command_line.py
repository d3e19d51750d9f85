"""A verb's own options: told from flags, directories and the keys of a run; each at most once, and
checked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fp4train.config.command_line import Amount, CommandLine, Count, option_names, read_line
from fp4train.errors import UserError

HELP = "fp4train fork RUN\n\nForks."


@dataclass(frozen=True, kw_only=True)
class Options(CommandLine):
    forks: Count = 6
    out: Path | None = None
    share: Amount | None = None
    step: int | tuple[int, ...] | None = None
    cells: bool = False
    prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class Named(CommandLine):
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name= is empty")


def of_run(*words: str) -> Options:
    """The command line of a verb that takes all keys of a run."""
    return read_line(list(words), Options, HELP, keys=None)


def test_a_command_line_is_taken_apart(working_folder: Path) -> None:
    Path("b=2").mkdir()
    Path("mine/recipe").mkdir(parents=True)
    Path("mine/recipe/ours.yaml").write_text("{}")
    line = of_run("runs/a", "b=2", "--config-dir", "mine", "forks=3", "recipe=nvfp4", "~schedule")
    assert line.verb == "fork" and line.runs == [Path("runs/a"), Path("b=2")]
    assert line.flags == ["--config-dir", "mine"] and line.folders == [Path("mine")]
    assert line.overrides == ["recipe=nvfp4", "~schedule"]
    assert (line.forks, line.out) == (3, None)
    assert (of_run("out=a").forks, of_run("out=a").out) == (6, Path("a"))
    assert option_names(Options) == ["forks", "out", "share", "step", "cells", "prompt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["forks=0"], "forks=0 must be a whole number from 1"),
        (["forks=x"], "forks='x' must be a whole number"),
        (["forks=2,3"], r"forks=\[2, 3\] must be a whole number"),
        (["share=-1"], "share=-1 must be a number from 0"),
        (["share=inf"], "share=inf must be finite"),
        (["cells=1"], "cells=1 must be true or false"),
        (["step=1,x"], r"step\[1\]='x' must be a whole number"),
        (
            ["step=interval(1,2)"],
            r"step=interval\(1,2\): Can only enumerate .*; write plain values",
        ),
        (["step=x"], "step='x' must be a whole number or a list or null"),
        (["out=a", "out=b"], "out=… is given twice"),
        (["frks=3"], "unknown key 'frks'; did you mean 'forks'?"),
        (["ot=a"], "unknown key 'ot'; did you mean 'out'?"),
        (["runs/a", "nothing=3"], "unknown key 'nothing'.* .known: .* and the keys of a run"),
    ],
)
def test_a_wrong_option_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of_run(*words)


def test_keys_of_a_run_and_folders_are_no_misspelt_options(working_folder: Path) -> None:
    Path("fork=2").mkdir()
    words = ["gpu=B200", "recipe=nvfp4", "model=moe_tiny", "forks.a=1", "fork=2"]
    assert of_run(*words).words == words
    assert of_run("nothing=3").words == ["nothing=3"], "what is composed has more to suggest"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("cells=TRUE", True),
        ("cells=false", False),
        ("forks=12", 12),
        ("share=0", 0.0),
        ("share=1e-3", 1e-3),
        ("share=null", None),
        ("step=100", 100),
        ("step=100,200", (100, 200)),
        ('prompt="def f(": #', '"def f(": #'),
        ("prompt=???", "???"),
    ],
)
def test_values_have_the_types_of_their_fields(word: str, value: Any) -> None:
    line = of_run(word)
    read = getattr(line, word.partition("=")[0])
    assert read == value and type(read) is type(value)


def test_an_option_without_a_default_must_be_given_and_its_class_checks_it() -> None:
    with pytest.raises(UserError, match=r"fork needs name=…: fp4train fork RUN$"):
        read_line([], Named, HELP)
    with pytest.raises(UserError, match=r"^name= is empty$"):
        read_line(["name="], Named, HELP)


def test_words_on_a_run_are_told_apart_by_what_the_verb_takes() -> None:
    words = ["runs/a", "recipe=a,b", "recipe.hadamard=false", "data.path=x.txt", "plugins=[mine]"]
    line = read_line(words, Options, HELP, keys=("recipe", "plugins"), paths=True)
    assert line.chosen == ["recipe=a,b", "recipe.hadamard=false"]
    assert line.paths == {"data.path": "x.txt"} and line.run == Path("runs/a")


def test_a_file_that_stands_for_an_option_may_have_any_name(working_folder: Path) -> None:
    file = Path("a=1 (b)'s/ours.yaml")
    file.parent.mkdir()
    file.write_text("_target_: fp4train.precision.NVFP4")
    words = [f"recipe=bf16,{file}", "plugins=[mine]"]
    line = read_line(words, Options, HELP, keys=("recipe", "plugins"))
    assert line.chosen == ["recipe=bf16,ours"] and line.packages == ["mine"]


@pytest.mark.parametrize(
    ("words", "keys", "message"),
    [
        (["policy=all"], ("recipe",), "unknown key 'policy' .known: forks, .*, recipe"),
        (["data.path=x"], ("recipe",), "unknown key 'data.path'"),
        (["--config-dir", "x"], ("recipe",), "fork knows no flag --config-dir: fp4train fork RUN"),
        (["-m"], ("recipe", "plugins"), "fork knows no flag -m"),
        (["--json"], (), "fork knows no flag --json"),
    ],
)
def test_what_a_verb_does_not_take_is_refused(
    words: list[str], keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_line(words, Options, HELP, keys=keys)


@pytest.mark.parametrize(
    "word", ["recipe=bf16", "recipe.element=e2m1", "policy=all", "phases=none"]
)
def test_what_says_the_precision_is_no_path_of_a_run(word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(UserError, match=f"unknown key '{key}'"):
        read_line([word], Options, HELP, keys=("plugins",), paths=True)


def test_the_number_of_run_directories_is_checked() -> None:
    with pytest.raises(UserError, match="fork needs one run directory: fp4train fork RUN"):
        _ = of_run("runs/a", "runs/b").run
    with pytest.raises(UserError, match="fork needs run directories: fp4train fork RUN"):
        _ = of_run().some_runs
