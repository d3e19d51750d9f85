"""Exports that are refused or interrupted: one line says why, and nothing is left."""

import errno
import os
import signal
from pathlib import Path

import pytest
from finished_runs import FinishedRuns
from forked import forked
from hf_exports import Command

from fp4train import files
from fp4train.exchange import export_huggingface

WRONG = {
    "no run": (("nowhere", "to=hf", "out=o"), "nowhere is not a run directory"),
    "two runs": (("{run}", "{run}", "to=hf", "out=o"), "export needs one run directory"),
    "no target": (
        ("{run}", "out=o"),
        "export needs to=…: fp4train export RUN to=hf|compressed-tensors|modelopt",
    ),
    "another target": (
        ("{run}", "to=hff", "out=o"),
        "compressed-tensors, modelopt; did you mean 'hf'?",
    ),
    "no out": (("{run}", "to=hf"), "export needs out=…: fp4train export RUN"),
    "the folder itself": (("{run}", "to=hf", "out=."), "out=. must be the name of a new folder"),
    "a word like an option": (
        ("{run}", "to=hf", "outt=o"),
        "unknown key 'outt'; did you mean 'out'?",
    ),
    "a dtype": (
        ("{run}", "to=hf", "out=o", "dtype=fp8"),
        "dtype='fp8' is not one of float32, bf16",
    ),
    "a step": (
        ("{run}", "to=hf", "out=o", "step=five"),
        "step='five' must be a whole number",
    ),
    "a step without checkpoint": (
        ("{run}", "to=hf", "out=o", "step=5"),
        "has no checkpoint of step 5; it has 6",
    ),
    "a size": (("{run}", "to=hf", "out=o", "shard=5"), "shard='5' must be a size: 500MB, 5GB"),
    "a path that no weights are read from": (
        ("{run}", "to=hf", "out=o", "data.path=text"),
        "data.path= is for codes, and to=hf writes the weights themselves",
    ),
    "a flag": (("{run}", "to=hf", "out=o", "--force"), "export knows no flag --force"),
    "an existing folder": (
        ("{run}", "to=hf", "out={run}"),
        "is there already, and nothing is written over",
    ),
    "a plugin that is not there": (("{run}", "to=hf", "out=o", "plugins=[nowhere]"), "nowhere"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_in_one_line(
    small_run: Path, command: Command, working_folder: Path, case: str
) -> None:
    words, said = WRONG[case]
    told = command("export", *(word.format(run=small_run) for word in words), code=1)
    assert said in told and told.count("fp4train: ") == 1
    assert os.listdir(working_folder) == []


def test_a_model_without_a_form_in_transformers_is_refused(
    small_run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4train.models.families.families", lambda *package: ())
    said = command("export", small_run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "Llama has no form in transformers" in said and os.listdir(tmp_path) == []


def test_a_shape_that_transformers_lacks_is_refused(
    finished: FinishedRuns, command: Command, tmp_path: Path
) -> None:
    run = finished("train.steps=1", "model.qk_norm=true", "model.qkv_bias=true")
    said = command("export", run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "has no form in transformers" in said and os.listdir(tmp_path) == []


def test_a_full_disk_ends_the_export_with_nothing_there(
    small_run: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: files.Buffer) -> None:
        os.write(descriptor, bytes(data)[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fp4train.exchange.folder.write_all", full)
        said = command("export", small_run, "to=hf", f"out={tmp_path / 'out'}", code=1)
    assert "out is not written: No space left on device. There is no folder of that name" in said
    assert os.listdir(tmp_path) == []


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
