"""What a run leaves behind, and the verbs around it."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import PATIENCE, STEADY, Cli, before_steps, events, lines, losses, recorded
from families import BEYOND_LLAMA, tiny_run
from limits import set_limit
from unused_wandb import forget_wandb

from fp4train import checkpoint

TRACED_WHOLE = {"hybrid": ("model.pattern=M-",), "hyena": ("model.pattern=DH",)}
"""Fewer kinds of blocks, which are traced as a whole."""


def compared(eager: list[Any], ours: list[Any]) -> Iterator[tuple[list[float], list[float]]]:
    """What two runs logged of their losses."""
    assert [set(line) for line in ours] == [set(line) for line in eager]
    for name in ("train/loss", "val/loss", "val/loss_recipe"):
        eager_values, values = (
            [line[name] for line in lines if name in line] for lines in (eager, ours)
        )
        assert values
        yield eager_values, values


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)  # see tests/house/test_skips.py
def test_a_compiled_run_learns_what_an_eager_one_does_through_phases_and_measurements(
    cli: Cli,
) -> None:
    small = ("model.layers=1", "policy=all", "train.steps=4", "eval.errors_every=2")
    assert cli("run.name=eager", *small).code == 0
    # a process of its own: the compiler forks
    compiled = cli.start("run.name=compiled", "train.compile=true", *small)
    _, err = compiled.communicate(timeout=900)
    assert compiled.returncode == 0 and "in the first step" not in err, err
    for eager, ours in compared(lines("runs/eager"), lines("runs/compiled")):
        assert ours == pytest.approx(eager, rel=0.02)
    assert cli("resume=runs/compiled", "train.compile=false", "train.steps=6").code == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("family", BEYOND_LLAMA)
def test_the_graphs_of_a_compiled_familys_blocks_compute_what_eager_blocks_do(
    cli: Cli, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of forward and backward are traced as for inductor, and run kernel by kernel."""
    model = tiny_run(family, *TRACED_WHOLE.get(family, ()))
    small = (*model, "policy=all", "phases=none", "train.steps=4", "eval.errors_every=2")
    assert cli("run.name=eager", *small).code == 0
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    ended = cli("run.name=compiled", "train.compile=true", *small)
    assert ended.code == 0 and "in the first step" not in ended.err, ended.err
    for eager, ours in compared(lines("runs/eager"), lines("runs/compiled")):
        assert ours == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("fp8_delayed", marks=pytest.mark.long)])
def test_measuring_errors_changes_nothing_of_a_run(cli: Cli, recipe: str) -> None:
    for name, every in (("a", 0), ("b", 1)):
        words = (f"recipe={recipe}", f"eval.errors_every={every}", "train.steps=4")
        assert cli(f"run.name={name}", *words).code == 0
    assert losses("runs/a") == losses("runs/b")
    assert any(key.startswith("error/") for line in lines("runs/b") for key in line)


@pytest.mark.long
def test_compiling_without_a_compiler_is_refused_before_the_run_begins(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    # of its own: the compiler that is found is remembered
    process = cli.start("run.name=a", "train.compile=true")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1 and "fp4train: train.compile=true needs a C++ compiler" in err
    assert "Traceback" not in err
    assert not Path("runs/a/config.yaml").exists()


def test_a_run_that_has_ended_leaves_no_thread_in_its_process(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limit(monkeypatch, "seconds until an idle thread ends", 3 * PATIENCE)
    earlier = set(threading.enumerate())
    assert cli("run.name=a").code == 0
    for thread in set(threading.enumerate()) - earlier:
        if thread.name != "tqdm_monitor":  # of the bars of a process, which keeps it
            thread.join(PATIENCE)
            assert not thread.is_alive(), thread.name


@pytest.mark.usefixtures("pictures")
def test_a_run_directory_holds_everything_about_its_run(cli: Cli) -> None:
    ended = cli("run.name=a", "eval.every=3", "checkpoint.every=2")
    assert ended.code == 0
    run = Path("runs/a")
    assert {p.name for p in run.iterdir()} == {
        ".lock",
        "config.yaml",
        "plan.txt",
        "metrics.jsonl",
        "curves.png",
        "checkpoints",
        "console.log",
        "heartbeat.json",
        "history.jsonl",
    }
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (
        config["recipe"]["_target_"] == "fp4train.precision.NVFP4" and config["train"]["steps"] == 6
    )
    assert "${" not in (run / "config.yaml").read_text()
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoint.steps(run / "checkpoints") == [4, 6], "the newest two"
    plan = (run / "plan.txt").read_text()
    assert "blocks.0.attention.wq" in plan and "step 5: NVFP4 with fprop in BF16" in plan
    logged = [line for line in lines(run) if "event" not in line]
    each = {f"train/{key}" for key in ("loss", "grad_norm", "lr", "tokens")}
    each |= {
        "step",
        "crc",
        "perf/tokens_per_s",
        "perf/memory_gb",
        "perf/data_wait",
        "precision/recipe",
    }
    for line in logged:
        assert set(line) == each | (
            {"val/loss", "val/loss_recipe"} if line["step"] in (3, 6) else set()
        )
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5, 6]
    assert logged[-1]["train/tokens"] == 6 * 4 * 32
    assert (
        logged[0]["train/loss"] == pytest.approx(5.7, abs=0.3)
        and logged[-1]["val/loss"] < logged[0]["train/loss"]
    )
    recipes = [(e["step"], e["recipe"]) for e in events(run, "recipe")]
    assert recipes == [(0, "NVFP4"), (5, "NVFP4 with fprop in BF16")]
    summary = ended.out.splitlines()
    assert len(summary) == 1 and summary[0].startswith("runs/a: step 6, done; train loss ")
    assert summary[0].endswith("; runs/a/curves.png")


def test_a_budget_of_tokens_is_kept_as_its_steps(cli: Cli) -> None:
    tiny = cli.tiny("run.name=a", *STEADY)
    words = [word for word in tiny if not word.startswith("train.steps=")]
    ended = cli.raw(*words, "train.tokens=0.3k")
    assert ended.code == 0, ended.err
    assert "train.tokens=0.3k: 2 steps of 128 tokens, 44 left over" in ended.err
    assert re.search(r"step 2, done; .*; [\d.]+ passes over the data; ", ended.out)
    assert re.search(r"2 steps of 128 tokens; [\d.]+ passes over the data; cpu", ended.err)
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())["train"]
    assert (saved["steps"], saved["tokens"]) == (2, None)
    shown = cli.raw("plan", "resume=runs/a", "train.tokens=1e3").out
    assert re.search(r"7 steps of 4 × 32 tokens, 896 in all, [\d.]+ passes over the data", shown)


def test_the_start_of_a_run_fits_on_a_screen(cli: Cli) -> None:
    ended = cli("run.name=a", "train.steps=1", "model.layers=12")
    start = ended.err[: ended.err.index("step 1/1")].splitlines()
    assert len(start) <= 14 and max(map(len, start[1:])) <= 120
    assert "  blocks 0–9    fprop dgrad wgrad  E2M1·E2M1" in ended.err
    assert "every layer and GEMM: runs/a/plan.txt" in ended.err


def test_the_plan_is_printed_and_nothing_is_written(cli: Cli) -> None:
    ended = cli("plan", "recipe=mxfp8", "full=true")
    assert ended.code == 0 and ended.err == ""
    assert (
        "MXFP8" in ended.out
        and "blocks.1.mlp.down" in ended.out
        and "multiply-adds of linear layers" in ended.out
    )
    folded = cli("plan", "recipe=mxfp8")
    assert folded.code == 0 and "block 0" in folded.out and "blocks.1.mlp.down" not in folded.out
    assert list(cli.folder.iterdir()) == []


def test_a_laptop_shows_the_plan_of_a_gpu_and_not_its_own(cli: Cli) -> None:
    wide = ("model.width=64", "model.hidden=128", "model.heads=2", "model.kv_heads=2")
    shown = cli("plan", "gpu=B200", *wide).out
    assert "emulate" not in shown and "not cpu" not in shown
    rows = [line for line in shown.splitlines() if "block 0" in line and "E2M1·E2M1" in line]
    assert len(rows) > 1 and all("B200" in row for row in rows)
    assert "on B200; gate, up share one quantised x" in shown, "as the plan says on that GPU"
    assert "not cpu" in cli("plan", *wide).out


def test_the_plan_of_a_resumed_run_knows_its_swaps(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2", "phases=none", "schedule=constant")
    planned = cli("plan", "resume=runs/a", "train.steps=5", "recipe=bf16")
    assert (
        "steps 0–1: NVFP4 (recipe)" in planned.out
        and "steps 2–4: BF16 (swap at step 2)" in planned.out
    )
    assert recorded("runs/a") == []


@pytest.mark.parametrize(
    "changed",
    [["model.layers=4"], ["run.seed=5", "recipe=bf16"], ["run.overwrite=true"], ["run.name=b"]],
    ids=["another model", "another seed", "a contradiction", "a name that is taken"],
)
def test_no_plan_of_a_resumed_run_that_training_would_refuse(cli: Cli, changed: list[str]) -> None:
    for name in ("a", "b"):
        cli.trained(f"run.name={name}", "train.steps=1")
    planned = cli("plan", "resume=runs/a", "train.steps=2", *changed)
    assert planned.code == 1 and planned.out == ""
    assert planned.message == cli("resume=runs/a", "train.steps=2", *changed).message


def test_formats_and_help_and_version_are_printed(cli: Cli) -> None:
    formats = cli.raw("formats")
    assert formats.code == 0 and "e2m1" in formats.out.lower()
    for arguments, option in (
        (["swap", "--help"], "cancel="),
        (["compare", "-h"], "out="),
    ):
        ended = cli.raw(*arguments)
        assert (
            ended.code == 0
            and ended.out.startswith(f"fp4train {arguments[0]} ")
            and option in ended.out
        )
    assert cli.raw("--version").out == "fp4train 0.1.0\n"


@pytest.mark.long
def test_hydras_own_flags_work(cli: Cli, tmp_path: Path) -> None:
    shown = yaml.safe_load(cli.raw("--cfg", "job", "train.steps=3").out)
    assert (
        shown["train"]["steps"] == 3 and shown["recipe"]["_target_"] == "fp4train.precision.NVFP4"
    )
    assert "shows one configuration" in cli.raw("-m", "--cfg", "job", "recipe=bf16,nvfp4").message
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "house.yaml").write_text(
        "defaults: [mxfp8, _self_]\nelement: hybrid\n"
    )
    own = ["plan", "--config-dir", "mine"]
    assert "E5M2·E4M3" in cli.raw(*own, "recipe=house", "recipe.two_d_weights=true").out
    assert "did you mean 'house'?" in cli.raw(*own, "recipe=huose").message
    assert (
        "unknown key 'recipe.elemnt'" in cli.raw(*own, "recipe=house", "recipe.elemnt=e4m3").message
    )


def test_a_sweep_is_refused_before_its_first_job_where_one_of_them_does_not_fit(cli: Cli) -> None:
    ended = cli("-m", "recipe=nvfp4,bf16", "optim.lr=1e-3,-1", "train.steps=2")
    assert "  recipe=nvfp4 optim.lr=-1: optim.lr=-1.0 must be > 0\n" in ended.err
    assert "  recipe=bf16 optim.lr=-1: optim.lr=-1.0 must be > 0\n" in ended.err
    assert "fp4train: the sweep is not started: \n" in ended.err and not list(
        Path("runs").glob("llama*")
    )
    assert (
        cli("-m", "optim.lr=1e-3,-1").message
        == "the sweep is not started: optim.lr=-1: optim.lr=-1.0 must be > 0"
    )


def test_a_sweep_goes_on_after_a_job_that_fails_and_ends_with_a_table(cli: Cli) -> None:
    Path("empty.txt").write_text("")
    ended = cli(
        "-m",
        "recipe=nvfp4,bf16",
        f"data.path=empty.txt,{cli.text}",
        "train.microbatch=2",
        "train.steps=2",
        "run.name=x",
    )
    assert ended.code == 1 and ended.err.count("fp4train: ") == 2
    header, _, *rows = [
        re.split(r"  +", line.strip()) for line in ended.out.rpartition("\njob ")[2].splitlines()
    ]
    assert header == ["recipe", "train loss", "val loss", "directory"]
    assert [row[-1] for row in rows] == ["failed", rows[1][-1], "failed", rows[3][-1]]
    assert [row[1] for row in rows] == ["NVFP4", "NVFP4", "BF16", "BF16"]
    assert rows[3][2] == f"{losses(rows[3][-1])[2][0]:.4f}"


@pytest.mark.long
def test_the_points_of_a_sweep_leave_no_trace_in_each_other(cli: Cli) -> None:
    sweep = ("-m", "run.name=x", "recipe=nvfp4,bf16", "train.microbatch=2", "train.steps=2")
    assert cli(*sweep).code == 0
    done = [f"x-recipe={recipe}" for recipe in ("bf16", "nvfp4")]
    assert sorted(p.name for p in Path("runs").glob("*-*")) == done
    assert cli("run.name=alone", "recipe=bf16", *sweep[3:]).code == 0
    assert losses(f"runs/{done[0]}") == losses("runs/alone"), "what ran before leaves no trace"
    assert cli(*sweep).out.count("is finished") == 2


def test_a_signal_ends_the_whole_sweep(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    before_steps(monkeypatch, lambda run: os.kill(os.getpid(), signal.SIGINT))
    assert cli("-m", "recipe=nvfp4,bf16,mxfp8").code == 130
    assert [p.name for p in Path("runs").glob("*-*")] == ["llama_tiny-nvfp4"]


def test_every_point_of_a_sweep_has_a_directory_of_its_own(cli: Cli) -> None:
    assert cli("-m", "optim.lr=1e-3,3e-3", "schedule=wsd,cosine", "train.steps=1").code == 0
    assert {p.name for p in Path("runs").glob("*-*")} == {
        f"llama_tiny-nvfp4-lr={lr}-schedule={schedule}"
        for lr in ("0.001", "0.003")
        for schedule in ("wsd", "cosine")
    }


def test_a_sweep_checks_its_keys_in_every_group_that_it_sweeps(cli: Cli) -> None:
    said = cli("-m", "recipe=nvfp4,bf16", "recipe.hadamard=true,false").message
    assert "unknown key 'recipe.hadamard'" in said
    assert not Path("runs").exists()


@pytest.mark.long
def test_without_an_account_wandb_is_offline(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever account the user of this machine has; the time that it takes is bounded in
    tests/track.
    """
    forget_wandb(monkeypatch, cli.folder)
    process = cli.start("run.name=a", "track=wandb", "train.steps=3")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "wandb is offline (not logged in" in err and "Traceback" not in err
    assert list(Path("runs/a/wandb").glob("offline-run-*/*.wandb"))
    assert sorted(losses("runs/a")) == [1, 2, 3]
