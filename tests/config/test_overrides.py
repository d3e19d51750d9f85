"""A verb's own options: told from flags, directories and the keys of a run; each at most once, and
checked.
"""

from pathlib import Path

import pytest

from fp4train.config.overrides import Option, count, number, read_options, truth
from fp4train.errors import UserError

KNOWN = {"forks": Option(count, "forks={!r} must be a whole number from 1", 6), "out": Option(Path)}


def test_a_command_line_is_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b=2").mkdir()
    words = ["runs/a", "b=2", "--config-dir", "mine", "forks=3", "recipe=nvfp4", "~schedule"]
    found = read_options(words, KNOWN)
    assert (found.runs, found.flags) == (["runs/a", "b=2"], ["--config-dir", "mine"])
    assert found.options == {"forks": 3, "out": None} and found.overrides == [
        "recipe=nvfp4",
        "~schedule",
    ]
    assert read_options(["out=a"], KNOWN).options == {"forks": 6, "out": Path("a")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["forks=0"], "forks='0' must be a whole number from 1"),
        (["out=a", "out=b"], "out=… is given twice"),
        (["frks=3"], "unknown key 'frks'; did you mean 'forks'?"),
        (["ot=a"], "unknown key 'ot'; did you mean 'out'?"),
    ],
)
def test_a_wrong_option_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_options(words, KNOWN)


def test_keys_of_a_run_and_folders_are_no_misspelt_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fork=2").mkdir()
    words = ["gpu=B200", "recipe=nvfp4", "model=moe_tiny", "forks.a=1", "fork=2", "nothing=3"]
    named = {"gpus": Option(), "recipes": Option(), "models": Option(), **KNOWN}
    assert read_options(words, named).words == words


def test_the_kinds_of_values() -> None:
    assert [truth("TRUE"), truth("false"), truth("1")] == [True, False, None]
    assert [count("12"), count("0"), count("x")] == [12, None, None]
    assert [number("0"), number("1e-3"), number("-1"), number("inf"), number("nan")] == [
        0.0,
        1e-3,
        None,
        None,
        None,
    ]
