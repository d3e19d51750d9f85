"""Model cards of exported runs: recipes by stretch, losses, results of tasks, and what is not
known.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from finished_runs import FinishedRuns
from hf_exports import Command, last_evaluation

from fp4train.exchange import export_huggingface
from fp4train.lab.analysis import training_loss


def test_the_model_card_says_how_the_model_was_trained(
    finished: FinishedRuns, small_run: Path, command: Command, tmp_path: Path
) -> None:
    command("export", small_run, "to=hf", f"out={tmp_path / 'out'}")
    card = (tmp_path / "out/README.md").read_text()
    last = last_evaluation(small_run)
    numbers = " | ".join(
        f"{last[key]:.4f}" for key in ("val/loss", "val/loss_recipe", "train/loss")
    )
    assert f"| 6 | NVFP4 with fprop in BF16 | {numbers} |" in card
    first, second = [
        line for line in card.splitlines() if line.startswith("| 0–") or line.startswith("| 5–")
    ]
    assert "NVFP4" in first and "E2M1·E2M1" in first and "fprop" in second and "cooldown" in second
    assert "blocks.0.attention.wq" in card and "policy.last=0.15" in card
    sentence = "1 audit of a live layer against the readable reference found 0 faults."
    assert f"{sentence} Audited layers: 1." in card
    assert (
        "fp4train 0." in card
        and "torch 2." in card
        and "The last 63 of 320 rows of the vocabulary" in card
    )
    assert not any(word in card for word in (str(tmp_path.parent), "data.path")), (
        "no path of this machine"
    )
    import yaml

    head = yaml.safe_load(card.split("---\n")[1])
    assert head["library_name"] == "transformers" and "nvfp4" in head["tags"]


def test_the_training_loss_of_the_card_is_the_mean_that_the_run_ended_with(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished("train.steps=12")
    mean = training_loss(run)
    assert mean is not None and mean.steps == 2
    export_huggingface(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    row = next(line for line in card.splitlines() if line.startswith("| 12 |"))
    assert row.endswith(f"| {mean.loss:.4f} |")
    assert f"{last_evaluation(run)['train/loss']:.4f}" not in row, "that is of the last batch"
    assert "mean of the last tenth of the steps so far, at most 2." in card


def test_a_run_that_ends_in_high_precision_has_the_losses_of_its_last_quantised_forward_pass(
    finished: FinishedRuns, tmp_path: Path
) -> None:
    export_huggingface(finished("eval.every=2"), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    before, after = re.findall(
        r"^\| (\d) \| (NVFP4.*?) \| ([\d.]+) \| ([\d.]+) \|", card, re.MULTILINE
    )
    assert before[:2] == ("4", "NVFP4") and before[2] != before[3]
    assert after[:2] == ("6", "NVFP4 with fprop in BF16") and after[2] == after[3]


def test_results_of_tasks_are_in_the_card(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    command("eval", run, "recipe=bf16,nvfp4")
    command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    card = (tmp_path / "out/README.md").read_text()
    held_out = [line for line in card.splitlines() if line.startswith("| held-out text |")]
    assert len(held_out) == 2 and all("loss " in line for line in held_out)
    assert "bf16" in held_out[0].lower() and "nvfp4" in held_out[1].lower()


def test_a_run_without_evaluations_or_records_says_so_in_its_card(
    small_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    (run / "metrics.jsonl").unlink()
    (run / "history.jsonl").unlink()
    export_huggingface(run, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert (
        "The run keeps no evaluation up to step 6." in card
        and card.count("has no record of what ran") == 2
    )


def test_a_name_of_a_run_is_text_in_its_card(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "a <b>|`c"))
    export_huggingface(run, tmp_path / "out")
    assert "\n# a \\<b\\>\\|\\`c\n" in (tmp_path / "out/README.md").read_text()


def test_damaged_metrics_are_said_and_are_no_run_without_evaluation(
    small_run: Path, command: Command, tmp_path: Path
) -> None:
    """Lines whose checksum is wrong, and lines that are none; a line that is being written is not
    damaged.
    """
    run = Path(shutil.copytree(small_run, tmp_path / "a"))
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    spoiled = [line.replace(b'"val/loss":', b'"val/loss" :') for line in lines]
    (run / "metrics.jsonl").write_bytes(b"".join([*spoiled, b"\0\0\0\n", b'{"step": 7, "val/l']))
    count = sum(line != other for line, other in zip(lines, spoiled, strict=True)) + 1
    said = f"{count} lines of metrics.jsonl are damaged"
    assert count > 1 and said in command("export", run, "to=hf", f"out={tmp_path / 'out'}")
    card = (tmp_path / "out/README.md").read_text()
    assert said in card and "The run keeps no evaluation up to step 6 that can be read." in card


@pytest.mark.parametrize("left", [0, 100])
def test_metrics_that_are_cut_off_are_said_where_the_card_has_no_losses(
    small_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "b"))
    os.truncate(run / "metrics.jsonl", left)
    export_huggingface(run, tmp_path / "cut")
    (said,) = [
        record.getMessage() for record in caplog.records if "model card" in record.getMessage()
    ]
    assert (
        said.startswith(f"{run / 'metrics.jsonl'} is cut off ({left} bytes of ")
        and "since the checkpoint" in said
    )
    caplog.clear()
    export_huggingface(small_run, tmp_path / "whole")
    assert not [record for record in caplog.records if "model card" in record.getMessage()]
