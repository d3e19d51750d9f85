"""No one in: links, pipes and huge files in a run directory lead nowhere."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    STEADY,
    Before,
    Cli,
    events,
    left,
)
from lengths import long_but
from made import write_run


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "metrics.jsonl",
        "plan.txt",
        *long_but((), (".metrics.jsonl.tmp", ".curves.png.tmp", "curves.png", "heartbeat.json")),
    ],
)
def test_no_link_in_a_run_directory_leads_to_a_file_elsewhere(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text('{"step": 0}\nprecious\n')
    Path("runs/a").mkdir(parents=True)
    Path("runs/a", name).symlink_to(victim)
    cli("run.name=a", "train.steps=1", *STEADY)
    assert victim.read_text() == '{"step": 0}\nprecious\n'


def test_overwriting_spares_a_folder_whose_configuration_is_not_ours(cli: Cli) -> None:
    Path("mine/checkpoints").mkdir(parents=True)
    Path("mine/checkpoints/precious").write_text("years of work")
    Path("mine/config.yaml").write_text("run: {name: mine}\nserver: {port: 80}\n")
    said = cli("run.name=a", "run.dir=mine", "run.overwrite=true", "train.steps=1").message
    assert "is not the configuration of a run of fp4train" in said
    assert Path("mine/checkpoints/precious").exists()


def test_names_in_a_run_directory_do_not_act_on_a_terminal(cli: Cli, tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, recipe="evil\x1b[2J\r\nfake")
    for command in (
        ["plan", "a"],
        ["plan", "a", "full=true"],
        ["compare", "a", "a", "out=gap.csv"],
    ):
        ended = cli.raw(*command)
        assert ended.code == 0 and "evil\\u001b[2J\\r\\nfake" in ended.out, command
        assert not set("\x1b\r") & set(ended.out + ended.err)


def test_requests_that_are_pipes_links_or_huge_are_refused_and_the_run_goes_on(
    cli: Cli, before: Before
) -> None:
    def ask(run: Any) -> None:
        folder = Path("runs/a/swap_requests")
        folder.mkdir()
        os.mkfifo(folder / "1.json")
        (folder / "2.json").symlink_to("/etc/passwd")
        with (folder / "3.json").open("wb") as file:
            file.truncate(4 << 30)
        (folder / "4.json").write_text(
            json.dumps({"recipe": {}, "name": "x", "at": 3, "sha256": "0"})
        )

    before(1, ask)
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 0
    said = [e["reason"] for e in events("runs/a", "swap refused")]
    assert len(said) == 4
    for reason, word in zip(said, ("pipe", "link", "not read", "damaged"), strict=True):
        assert word in reason
    assert left("runs/a") == []
