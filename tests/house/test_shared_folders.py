"""What a fixture made for several tests stays as it was: see `tests/helpers/shared_folders.py`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from shared_folders import GROWING, watched


def made_by(fixture: str, base: Path) -> tuple[Path, list[Callable[[], None]]]:
    """(The text in the folder that a fixture made, what is called where it ends)."""
    ends: list[Callable[[], None]] = []
    with watched(base, fixture, ends.append):
        text = base / "data0" / "text.txt"
        (text.parent / "model").mkdir(parents=True)
        text.write_text("text")
    return text, ends


@pytest.mark.parametrize(
    "store",
    [
        lambda text: text.parent / "finished" / "0",
        lambda text: text.with_name("runs"),
        lambda text: Path(str(text).rpartition("/")[0]) / "runs",
        lambda text: Path(f"{text}-runs"),
        lambda text: text.parent / "model" / "runs",
    ],
    ids=["beside the text", "by another name", "above the text", "by a longer name", "below"],
)
def test_a_store_in_the_folder_of_a_shared_fixture_is_an_error(
    store: Callable[[Path], Path], tmp_path: Path
) -> None:
    text, (end,) = made_by("words", tmp_path)
    end()
    store(text).mkdir(parents=True)
    with pytest.raises(AssertionError, match="the folder of the fixture words, which several"):
        end()


def test_a_tests_own_folder_is_none_of_it(tmp_path: Path) -> None:
    text, (end,) = made_by("words", tmp_path)
    (tmp_path / "own0").mkdir()
    (tmp_path / "own0" / "run").mkdir()
    text.write_text("other text")
    end()


@pytest.mark.parametrize("fixture", GROWING)
def test_what_grows_by_names_that_no_two_tests_choose_gets_no_run(
    fixture: str, tmp_path: Path
) -> None:
    text, (end,) = made_by(fixture, tmp_path)
    (text.parent / "cache").mkdir()
    end()
    run = text.parent / "finished" / "0" / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    with pytest.raises(AssertionError, match=f"'finished/0/runs/a'.* the fixture {fixture}, which"):
        end()
