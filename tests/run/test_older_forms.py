"""Files of forms that this version no longer writes are refused: one message says which, and what
to do.

earlier_run.tar.gz has the run of an older version (commit 24397fc) as it left it: `run`, a Llama of
one block, and `text.txt`, its data. Its checkpoints hold weights and moments in one file.
"""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import STEADY, Cli, everything, in_one_file, losses, reseal

from fp4train.sealed import open_line

ADVICE = (
    "Go on with the commit 2144e3d1 (November 26, 2026), the last that reads it, or begin a "
    "new run (another run.name, "
    "or run.overwrite=true)"
)
OPTIONS = ("run.name=a", "train.steps=2", *STEADY)


def without_checksums(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        lines = [open_line(raw) for raw in (run / name).read_bytes().splitlines()]
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def with_one_file(run: Path) -> None:
    in_one_file(run / "checkpoints/step_00000002", version=1)


def without(key: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        def remove(state: dict[str, Any]) -> None:
            del state[key]

        reseal(run / "checkpoints/step_00000002", lambda tensors: None, remove)

    return change


FORMS = {
    "journal": (
        without_checksums("history.jsonl"),
        "history.jsonl",
        "has lines without the checksums of today",
    ),
    "metrics": (
        without_checksums("metrics.jsonl"),
        "metrics.jsonl",
        "has lines without the checksums of today",
    ),
    "one file": (with_one_file, "checkpoints/step_00000002", "has checkpoint format version 1"),
    "no run": (without("run"), "checkpoints/step_00000002", "has no record of run"),
    "no swaps": (without("swaps"), "checkpoints/step_00000002", "has no record of swaps"),
}


@pytest.mark.parametrize(("change", "file", "difference"), FORMS.values(), ids=FORMS)
def test_a_resume_refuses_it_and_changes_nothing(
    cli: Cli, change: Callable[[Path], None], file: str, difference: str
) -> None:
    run = cli.trained(*OPTIONS)
    change(run)
    before = everything(run)
    said = cli("resume=runs/a", "train.steps=3", *cli.paths).message
    assert (
        said == f"{run / file} is of an older fp4train: it {difference}, which this one does not "
        f"read. {ADVICE}"
    )
    assert everything(run) == before


@pytest.mark.long
def test_a_run_that_replaces_it_begins_anew(cli: Cli) -> None:
    run = cli.trained(*OPTIONS)
    without_checksums("history.jsonl")(run)
    assert cli(*OPTIONS, "run.overwrite=true").code == 0
    assert list(losses(run)) == [1, 2]
    assert cli("resume=runs/a", "train.steps=3", *STEADY).code == 0


DATA = ("data.path=text.txt", "data.cache_dir=cache")


@pytest.mark.parametrize(
    "command",
    [
        ("resume=run", *DATA),
        ("sample", "run", "prompt=a", *DATA),
        ("export", "run", "to=hf", "out=out"),
    ],
    ids=["resume", "sample", "export"],
)
def test_a_run_that_an_older_version_wrote_is_refused(cli: Cli, command: tuple[str, ...]) -> None:
    with tarfile.open(Path(__file__).with_name("earlier_run.tar.gz")) as archive:
        archive.extractall(cli.folder, filter="data")
    before = everything(Path("run"))
    said = cli.raw(*command).message
    assert (
        said.startswith("run/")
        and "is of an older fp4train: it has" in said
        and said.endswith(ADVICE)
    ), said
    assert everything(Path("run")) == before
