"""Rows without a known length, as a plugin: docs/plugins.md's source in a run, resumed to the bit."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Cli, StopAt, losses
from shown import write_shown

WORDS = (
    *("--config-dir", "mine", "plugins=[mylab]", "data=file_by_file", "data.path=texts/*.txt"),
    *("train.steps=6", "checkpoint.every=3", "eval.every=3", "phases=none"),
)


@pytest.fixture(autouse=True)
def texts(cli: Cli) -> Iterator[None]:
    write_shown(Path())
    Path("texts").mkdir()
    for number in range(30):
        text = "".join(f"{number} and {word}; " for word in range(20))
        Path(f"texts/{number:02}.txt").write_text(text)
    yield
    sys.modules.pop("mylab", None)


def test_a_run_is_resumed_to_the_bit_and_reads_no_file_that_it_had_read(
    cli: Cli, stop_at: StopAt
) -> None:
    assert cli(*WORDS, "run.name=whole").code == 0
    stop_at(4)
    assert cli(*WORDS, "run.name=cut").code == 137
    stop_at(-1)
    (saved,) = Path("runs/cut/checkpoints").glob("*3/state.json")
    place = json.loads(saved.read_text())["state"]["data_place"]
    assert place["position"] == 12 and json.loads(place["place"])[0] > 0
    first = Path("texts/01.txt")  # behind which the checkpoint lies
    first.write_bytes(bytes(len(first.read_bytes())))
    resumed = cli("resume=runs/cut", "--config-dir", "mine", "plugins=[mylab]")
    assert resumed.code == 0, resumed.err
    assert losses("runs/cut") == losses("runs/whole") and len(losses("runs/cut")) == 6
    first.write_text("shorter")
    refused = cli("resume=runs/cut", "train.steps=8", "--config-dir", "mine", "plugins=[mylab]")
    assert refused.code == 1 and "was trained on other data" in refused.message


@pytest.mark.long
def test_a_run_whose_rows_end_is_saved(cli: Cli) -> None:
    ended = cli(*WORDS, "run.name=a", "train.steps=99")
    assert ended.code == 1
    assert "of the train data is asked for, and the data end before it" in ended.message
    assert [path.name for path in Path("runs/a/checkpoints").iterdir()]


@pytest.mark.long
def test_other_data_has_no_place_in_its_checkpoints(cli: Cli) -> None:
    assert cli("train.steps=1", "run.name=a").code == 0
    (saved,) = Path("runs/a/checkpoints").glob("*/state.json")
    assert "data_place" not in json.loads(saved.read_text())["state"]
