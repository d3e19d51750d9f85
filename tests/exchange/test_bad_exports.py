"""Exports that are refused or interrupted: one line says why, and nothing is left."""

import os
import signal
from pathlib import Path

import pytest
from finished_runs import FinishedRuns
from forked import forked
from hf_exports import Command

from fp4train.exchange import export_huggingface

WRONG = {
    "no run": (("nowhere", "to=hf", "out=o"), "nowhere is not a run directory"),
    "two runs": (("{run}", "{run}", "to=hf", "out=o"), "export needs one run directory"),
    "no target": (
        ("{run}", "out=o"),
        "export needs to=…: fp4train export RUN to=hf|compressed-tensors|modelopt",
    ),
    "no out": (("{run}", "to=hf"), "export needs out=…: fp4train export RUN"),
    "the folder itself": (("{run}", "to=hf", "out=."), "out=. must be the name of a new folder"),
    "a step without checkpoint": (
        ("{run}", "to=hf", "out=o", "step=5"),
        "has no checkpoint of step 5; it has 6",
    ),
    "a size": (("{run}", "to=hf", "out=o", "shard=5"), "shard='5' must be a size: 500MB, 5GB"),
    "a path that no weights are read from": (
        ("{run}", "to=hf", "out=o", "data.path=text"),
        "data.path= is for codes, and to=hf writes the weights themselves",
    ),
    "an existing folder": (
        ("{run}", "to=hf", "out={run}"),
        "is there already, and nothing is written over",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_in_one_line(
    small_run: Path, command: Command, working_folder: Path, case: str
) -> None:
    words, said = WRONG[case]
    told = command("export", *(word.format(run=small_run) for word in words), code=1)
    assert said in told and told.count("fp4train: ") == 1
    assert os.listdir(working_folder) == []


def test_a_shape_that_transformers_lacks_is_refused(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    run = finished("train.steps=1", "model.qk_norm=true", "model.qkv_bias=true")
    said = command("export", run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "has no form in transformers" in said and os.listdir(tmp_path) == []


def test_a_kill_in_the_middle_leaves_nothing_that_looks_whole(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    def killed() -> None:
        def tell(done: int, total: int | None, what: str) -> None:
            if done == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        export_huggingface(small_run, tmp_path / "out", tell=tell)

    assert forked(killed) == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".out.")
    command("export", small_run, "to=hf", f"out={tmp_path / 'out'}")
    assert os.listdir(tmp_path) == ["out"]
