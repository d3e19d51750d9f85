"""Data that changes while a run trains: the run ends with a message, and its state is saved."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import STEADY, TINY, Before, Cli, besides, losses, steps
from lengths import long_but


def cut_off(path: Path) -> None:
    os.truncate(path, 100)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\x07\x00" * (path.stat().st_size // 2))


CHANGES = {
    "cut off after the run had opened it": cut_off,
    "changed after it was written": overwritten,
}


@pytest.mark.parametrize("change", long_but(("changed after it was written",), CHANGES))
def test_a_run_whose_cache_changes_ends_saved_and_goes_on_when_it_is_tokenised_again(
    cli: Cli, before: Before, tmp_path: Path, change: str
) -> None:
    words = ("train.steps=6", *STEADY, "checkpoint.every=0")
    assert cli("run.name=whole", *words, f"data.cache_dir={tmp_path}").code == 0
    (cached,) = tmp_path.glob("*/*.bin")
    before(3, lambda run: CHANGES[change](cached))
    ended = cli("run.name=a", *words, f"data.cache_dir={tmp_path}")
    assert ended.code == 1
    assert f"{cached.name} was {change}" in ended.message
    (saved,) = steps()
    assert saved in (3, 4), "the rows of one step are read ahead"
    assert cli.raw("resume=runs/a").code == 0
    assert losses("runs/a") == losses("runs/whole")


def test_a_run_below_the_folder_of_its_data_is_no_part_of_it(cli: Cli) -> None:
    """The files that it writes would be learned by whoever repeats the command."""
    for number in range(3):
        Path(f"{number}.txt").write_text(f"note {number}: to be or not to be\n" * 200)
    words = ("data.path=.", "data.cache_dir=.cache", *STEADY)
    assert cli("run.name=a", "train.steps=2", *words).code == 0
    assert Path("runs/a/plan.txt").is_file()
    again = cli("run.name=b", "train.steps=2", *words)
    assert ", 3 files: " in again.err
    assert "data.path: run directories are left out (runs/a)" in again.err
    assert losses("runs/b") == losses("runs/a")
    assert cli.raw("resume=runs/a", "train.steps=3").code == 0


@pytest.mark.long
def test_a_run_whose_token_file_changes_ends_saved(cli: Cli, before: Before) -> None:
    (np.arange(8000) % 50).astype(np.uint16).tofile("ids.bin")
    good = Path("ids.bin").read_bytes()
    data = ("data=tokens", "data.path=ids.bin", "data.vocab_size=50", "checkpoint.every=0")
    words = [*besides(TINY, {"data"}), *data, *STEADY]

    def touch(run: Any) -> None:
        Path("ids.bin").touch()

    before(2, touch)
    assert cli.raw("run.name=touched", *words).code == 0
    before(3, lambda run: cut_off(Path("ids.bin")))
    ended = cli.raw("run.name=a", *words)
    assert ended.code == 1
    assert "ids.bin was cut off after the run had opened it" in ended.message
    assert steps() in ([3], [4])
    Path("ids.bin").write_bytes(good)
    assert cli.raw("resume=runs/a").code == 0
    assert losses("runs/a") == losses("runs/touched")
