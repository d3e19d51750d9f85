"""A sweep: its table with means over seeds, the group its runs share, and what each prints."""

import io
import re
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import STEADY, Cli
from configured import points_of

from fp4train.cli.console import kept_console
from fp4train.lab.analysis import training_loss


@pytest.mark.long
def test_runs_that_differ_in_their_seed_are_averaged_below_the_jobs(cli: Cli) -> None:
    ended = cli("-m", "recipe=bf16,mxfp8", "run.seed=0,1", "run.name=s", "train.steps=2", *STEADY)
    assert ended.code == 0, ended.err
    rows = [line for line in ended.out.splitlines() if "±" in line and "n" not in line.split()[:1]]
    header, *means = [line for line in ended.out.splitlines() if "±" in line]
    assert header.split()[:5] == ["mean", "±", "95%", "interval", "over"] and rows
    assert [re.split(r" {2,}", line)[:3] for line in means] == [
        ["recipe=bf16", "BF16", "2"],
        ["recipe=mxfp8", "MXFP8", "2"],
    ]
    losses = [training_loss(Path(f"runs/s-recipe=bf16-seed={seed}")) for seed in (0, 1)]
    known = [found.loss for found in losses if found is not None]
    half = 12.7062 * np.std(known, ddof=1) / np.sqrt(2)
    assert f"{np.mean(known):.4f} ± {half:.4f}" in means[0], "t(1) = 12.7062"


def test_a_sweep_names_plans_and_losses_without_metrics_too(cli: Cli) -> None:
    ended = cli("-m", "recipe=bf16,mxfp8", "run.name=s", "train.steps=1", "track=none", *STEADY)
    assert ended.code == 0 and "over seeds" not in ended.out
    assert "E4M3·E4M3" not in ended.err and ended.err.count("every layer and GEMM: ") == 2
    rows = [line.split() for line in ended.out.splitlines() if line.startswith("recipe=")]
    assert len(rows) == 2
    assert all(re.fullmatch(r"\d\.\d{4}", loss) for row in rows for loss in row[2:4])
    assert "the train loss is that of the last batch" in ended.out


def test_a_refused_job_has_no_losses_of_the_run_that_lies_there(cli: Cli) -> None:
    command = ("-m", "run.seed=0,1", "run.name=s", "recipe=bf16", *STEADY)
    assert cli(*command, "train.steps=1").code == 0
    ended = cli(*command, "train.steps=2")
    assert ended.code == 1 and "over seeds" not in ended.out
    rows = [line.split() for line in ended.out.splitlines() if line.startswith("run.seed=")]
    assert [row[2:4] + row[5:] for row in rows] == [["-", "-", "failed"]] * 2


@pytest.mark.long
def test_the_sweep_of_an_experiment_can_be_left_out() -> None:
    command = ["-m", "experiment=nvfp4_ablations", "run.seed=0,1"]
    alone = points_of([*command, "~hydra.sweeper.params.recipe"])
    assert [point.point for point in alone] == ["run.seed=0", "run.seed=1"]
    assert len(points_of(command)) == 10


@pytest.mark.long
def test_the_runs_of_a_sweep_share_a_group(cli: Cli) -> None:
    tracked = ("track=wandb", "track.mode=offline")
    assert (
        cli("-m", "recipe=bf16,mxfp8", "run.name=s", "train.steps=1", *tracked, *STEADY).code == 0
    )
    saved = [
        yaml.safe_load(path.read_text()) for path in sorted(Path("runs").glob("*/config.yaml"))
    ]
    assert [body["track"]["group"] for body in saved] == ["recipe=bf16,mxfp8"] * 2


@pytest.mark.long
def test_what_a_run_prints_is_kept_in_its_folder_and_with_its_charts(cli: Cli) -> None:
    ended = cli("run.name=a", "train.steps=2", "track=wandb", "track.mode=offline", *STEADY)
    kept = Path("runs/a/console.log").read_text("utf-8")
    assert "\r" not in kept and all(line in kept for line in ended.out.splitlines() if line.strip())
    assert "every layer and GEMM: runs/a/plan.txt" in kept
    (sent,) = Path("runs/a/wandb").glob("offline-run-*/files/output.log")
    assert "every layer and GEMM: runs/a/plan.txt" in sent.read_text("utf-8")
    again = cli("run.name=a", "train.steps=2", "run.overwrite=true", *STEADY)
    assert (
        again.code == 0
        and Path("runs/a/console.log").read_text("utf-8").count("every layer and GEMM") == 1
    )
    resumed = cli("resume=runs/a", "train.steps=3")
    assert (
        resumed.code == 0
        and Path("runs/a/console.log").read_text("utf-8").count("every layer and GEMM") == 2
    )


def test_a_bar_leaves_its_last_state_and_an_error_its_message(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it broke"), kept_console() as console:
        print("before")
        console.write_to(tmp_path)
        print("\r 10%", end="")
        print("\r 50%", end="\r     \ra message\n")
        print("\r100%")
        raise ValueError("it broke")
    assert (
        tmp_path / "console.log"
    ).read_text() == "before\na message\n100%\nValueError: it broke\n"


def test_a_reader_that_has_gone_takes_no_end_of_a_line_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    with kept_console() as console:
        console.write_to(tmp_path)
        for text in ("two\nlines", "more"):
            with suppress(OSError):
                print(text, file=sys.stderr)
    assert (tmp_path / "console.log").read_text() == "two\nlines\nmore\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("init=nowhere/mine",), "nowhere/mine"),
        (("data.path=nowhere.txt",), "nowhere.txt"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_before_the_run_that_is_there(
    cli: Cli, words: tuple[str, ...], message: str
) -> None:
    cli.trained("run.name=a", *STEADY)
    ended = cli("run.name=a", *words, *STEADY)
    assert (
        ended.code == 1
        and message in ended.message
        and "another configuration" not in ended.message
    )
    valid = cli("run.name=a", "train.steps=7", *STEADY)
    assert valid.code == 1 and "another configuration (train.steps: 6 → 7)" in valid.message
    fewer = cli("run.name=a", "train.steps=5", *STEADY)
    assert fewer.code == 1 and "choose another run.name" in fewer.message
    assert "goes on to that step" not in fewer.message, "it is past"
