"""A run that was interrupted equals one that was not, to the bit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import STEADY, Cli, StopAt, events, losses, recorded
from lengths import long_but

from fp4train import checkpoint
from fp4train.run import find

CASES = {
    "nvfp4 through its cooldown phase": [],
    "stochastic weights and gradients": ["recipe=mxfp4", "policy=all"],
    "recomputation in microbatches": ["model.recompute=true", "train.microbatch=1"],
    "one scale for fused weights": ["recipe.fused_scales=true", "policy=all", "train.microbatch=2"],
    "delayed scaling": ["recipe=fp8_delayed", "policy=all", "phases=none"],
    "delayed scaling in microbatches": [
        "recipe=fp8_delayed",
        "train.microbatch=2",
        "recipe.history=2",
    ],
    "delayed scaling from the latest amax": [
        "recipe=fp8_delayed",
        "recipe.algorithm=most_recent",
        "phases=none",
    ],
    "moments in BF16": ["recipe=bf16", "optim.moments=bfloat16", "phases=none"],
    "fp16's loss scale": [
        "recipe=fp16",
        "recipe.scaling.initial=1e10",
        "recipe.scaling.interval=2",
        "phases=none",
    ],
    "a forward and a backward recipe": [
        "recipe=nvfp4_forward_mxfp8_backward",
        "schedule=cosine",
        "policy=all",
    ],
    "a watch of weights that oscillate": [
        "recipe=tetrajet_v2",
        "phases=none",
        "oscillation.every=3",
        "oscillation.watch=2",
        "oscillation.ratio=1.5",
    ],
    "outlier channels in the middle of their recording": [
        "recipe=tetrajet_v2_outliers",
        "policy=all",
        "phases=none",
        "recipe.outliers.multiple=8",
        "recipe.outliers.start=1",
        "recipe.outliers.steps=4",
        "model.recompute=true",
        "train.microbatch=2",
        "model.layers=1",
    ],
    "outlier channels that are chosen": [
        "recipe=tetrajet_v2_outliers",
        "policy=all",
        "recipe.outliers.multiple=8",
        "eval.errors_every=2",
        "recipe.outliers.start=0",
        "recipe.outliers.steps=2",
        "model.layers=1",
        "oscillation.every=3",
        "oscillation.watch=2",
        "oscillation.ratio=1.5",
    ],
    "means that are taken out": [
        "recipe=averis",
        "policy=all",
        "model.recompute=true",
        "train.microbatch=2",
        "eval.errors_every=2",
    ],
    "residuals of hot channels": ["recipe=chon", "policy=all", "train.microbatch=2"],
    "bf16 of everything in the cooldown": ["phases=cooldown_bf16", "schedule.cooldown=3"],
}
SHORT = (
    "nvfp4 through its cooldown phase",
    "one scale for fused weights",
    "delayed scaling in microbatches",
    "moments in BF16",
    "fp16's loss scale",
    "a watch of weights that oscillate",
    "outlier channels in the middle of their recording",
    "residuals of hot channels",
)
"""Each state that a run keeps beside its weights. The average of weights and amaxes that are held have
tests of their own.
"""


@pytest.mark.parametrize("case", long_but(SHORT, CASES))
def test_an_interrupted_run_equals_an_uninterrupted_one_to_the_bit(cli: Cli, case: str) -> None:
    # Evaluation at the checkpoint: what it prepares must not leak into the next step.
    every = ["checkpoint.every=3", "checkpoint.keep=2", "eval.every=3"]
    assert cli("run.name=whole", *every, *CASES[case]).code == 0
    assert cli("resume=runs/whole", "resume_step=3", "run.name=cut").code == 0
    assert losses("runs/cut") == losses("runs/whole")
    assert sorted(losses("runs/cut")) == list(range(1, 7))
    ends = [checkpoint.load(Path(f"runs/{name}/checkpoints")).tensors for name in ("whole", "cut")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(cli: Cli) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert cli(f"run.name={name}", f"run.seed={seed}", "train.steps=2").code == 0
    assert losses("runs/a") == losses("runs/b") != losses("runs/c")


def test_the_same_command_continues_and_then_says_that_it_is_finished(
    cli: Cli, stop_at: StopAt
) -> None:
    stop_at(4)
    assert cli("run.name=a", "checkpoint.every=2").code == 137
    stop_at(-1)
    again = cli("run.name=a", "checkpoint.every=2")
    assert again.code == 0 and "going on from step 4" in again.err
    before = Path("runs/a/metrics.jsonl").read_bytes()
    finished = cli("run.name=a", "checkpoint.every=2")
    assert finished.code == 0 and "is finished: 6 steps" in finished.out
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


def test_a_resume_to_fewer_steps_than_were_done_says_so(cli: Cli) -> None:
    """And not that the learning rate has come down; where an earlier checkpoint is kept it is
    named, and the command for it does what is asked for.
    """
    cli.trained("run.name=a", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=9")
    ended = cli("resume=runs/a", "train.steps=5")
    said = " ".join(ended.out.split())
    assert ended.code == 0 and "learning rate" not in said
    assert "runs/a has done 6 steps, and train.steps=5 is below that: nothing is trained." in said
    branch = "resume=runs/a resume_step=4 train.steps=5 run.name="
    assert f"{branch}… trains them as another run" in said
    assert cli(*f"{branch}b".split()).code == 0 and len(losses("runs/b")) == 5
    assert "resume_step" not in cli("resume=runs/a", "train.steps=2").out


def test_a_run_killed_before_its_first_checkpoint_starts_again(cli: Cli, stop_at: StopAt) -> None:
    stop_at(2)
    assert cli("run.name=a").code == 137
    stop_at(-1)
    assert cli("run.name=a").code == 0
    assert sorted(losses("runs/a")) == list(range(1, 7))


@pytest.mark.long
def test_a_run_from_before_an_option_existed_has_its_default(cli: Cli, stop_at: StopAt) -> None:
    cli.trained("run.name=whole", "checkpoint.every=2")
    stop_at(5)
    for name in ("a", "b"):
        assert cli(f"run.name={name}", "checkpoint.every=2").code == 137
        path = Path(f"runs/{name}/config.yaml")
        saved = yaml.safe_load(path.read_text())
        for section, option in (
            ("train", "compile"),
            ("recipe", "hadamard"),
            ("policy", "recipe_for_kept"),
        ):
            del saved[section][option]
        del saved["data"]["tokenizer"]
        path.write_text(yaml.safe_dump(saved))
    stop_at(-1)
    said = cli("run.name=a", "train.compile=true", "recipe.hadamard=false").message
    assert (
        "another configuration (recipe.hadamard: True → False; train.compile: False → True)" in said
    )
    said = cli("run.name=a", "policy=mxfp8_tail").message
    assert (
        "(policy.recipe_for_kept._target_: fp4train.precision.recipes.high.BF16 → "
        "fp4train.precision.recipes.mx.MX" in said
    )
    again = cli("run.name=a", "checkpoint.every=2")
    assert again.code == 0 and "going on from step 4" in again.err
    paths = [
        f"data.{key}={saved['data'][key]}" for key in ("path", "cache_dir")
    ]  # an unsigned configuration's are asked
    assert cli("resume=runs/b", *paths).code == 0
    assert losses("runs/a") == losses("runs/b") == losses("runs/whole")


def test_more_steps_go_on_where_a_finished_run_ended(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=3", "phases=none", "schedule=constant").code == 0
    assert (
        cli(
            "run.name=b", "train.steps=5", "phases=none", "schedule=constant", "schedule.warmup=0"
        ).code
        == 0
    )
    assert cli("resume=runs/a", "train.steps=5", "schedule.warmup=0").code == 0
    assert sorted(losses("runs/a")) == list(range(1, 6))


def test_a_recipe_given_with_resume_is_a_swap_that_is_recorded_and_kept(
    cli: Cli, stop_at: StopAt
) -> None:
    stop_at(2)
    options = ["phases=none", "checkpoint.every=2"]
    assert cli("run.name=a", *options).code == 137
    stop_at(4)
    command = ["resume=runs/a", "recipe=mxfp8"]
    assert cli(*command).code == 137
    assert recorded("runs/a") == [(2, "mxfp8")]
    assert [e["recipe"] for e in events("runs/a", "swap")] == ["mxfp8"]
    stop_at(5)
    assert cli(*command).code == 137, "the same command again goes on and records nothing more"
    stop_at(-1)
    assert cli("resume=runs/a").code == 0
    assert [values[-1] for values in losses("runs/a").values()] == ["NVFP4"] * 2 + ["MXFP8"] * 4
    assert recorded("runs/a") == [(2, "mxfp8")]
    assert "_target_: fp4train.precision.NVFP4" in Path("runs/a/config.yaml").read_text()
    assert "steps 2–5: MXFP8 (swap at step 2)" in Path("runs/a/plan.txt").read_text()


def test_a_loss_scale_begins_with_the_first_recipe_that_has_one_and_goes_with_it(
    cli: Cli, stop_at: StopAt
) -> None:
    """By a swap, and a resume of it in its first step and after; the cooldown is in BF16."""
    stop_at(2)
    options = ["phases=cooldown_bf16", "phases.cooldown.start=5", "checkpoint.every=1"]
    assert cli("run.name=a", "recipe=nvfp4", *options).code == 137
    stop_at(3)
    assert cli("resume=runs/a", "recipe=nvfp4_ue5m3").code == 137
    stop_at(-1)
    assert cli("resume=runs/a").code == 0
    assert loss_scales() == [None, None, 65536.0, 65536.0, 65536.0, None]


def loss_scales() -> list[float | None]:
    """The loss scale of each step."""
    return [values[3] for values in losses("runs/a").values()]


@pytest.mark.long
def test_a_loss_scale_begins_anew_where_a_run_is_continued_past_its_cooldown(cli: Cli) -> None:
    """The steps before have another recipe in the longer run than the one that they ran in."""
    cooldown = ("phases=cooldown_bf16", "phases.cooldown.start=2")
    assert cli("run.name=a", "recipe=nvfp4_ue5m3", "train.steps=3", *cooldown).code == 0
    assert cli("resume=runs/a", "train.steps=5", "phases=none").code == 0
    assert loss_scales() == [65536.0, 65536.0, None, 65536.0, 65536.0]


def test_a_loss_scale_begins_anew_where_another_loss_scaling_begins(cli: Cli) -> None:
    recipe = "recipe=nvfp4_ue5m3"
    assert cli("run.name=a", recipe, "recipe.scaling.initial=4", "train.steps=2").code == 0
    assert cli("resume=runs/a", recipe, "train.steps=4").code == 0
    assert loss_scales() == [4.0, 4.0, 65536.0, 65536.0]


def test_a_phase_from_the_first_step_on_has_its_loss_scale(cli: Cli) -> None:
    scaled = (
        "{_target_: fp4train.precision.Custom,"
        " scaling: {_target_: fp4train.precision.LossScaling, initial: 8.0}}"
    )
    phase = ("phases=cooldown_bf16", "phases.cooldown.start=0", f"phases.cooldown.recipe={scaled}")
    assert cli("run.name=a", "recipe=nvfp4", "train.steps=2", *phase).code == 0
    assert loss_scales() == [8.0, 8.0]


def test_a_swap_to_a_finished_run_changes_nothing(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2")
    assert "is finished" in cli("resume=runs/a", "recipe=mxfp8").out
    assert recorded("runs/a") == []


def test_a_new_name_makes_a_branch_and_leaves_the_run_alone(cli: Cli, stop_at: StopAt) -> None:
    assert (
        cli(
            "run.name=a", "train.steps=4", "checkpoint.every=2", "phases=none", "schedule=constant"
        ).code
        == 0
    )
    before = {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()}
    branch = ["resume=runs/a", "run.name=b", "recipe=bf16", "train.steps=7", "checkpoint.every=2"]
    stop_at(5)
    assert cli(*branch).code == 137, "killed before its first own checkpoint"
    stop_at(-1)
    again = cli(*branch)
    assert again.code == 0 and "going on from step 4 of runs/a" in again.err
    assert {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()} == before
    assert [values[-1] for values in losses("runs/b").values()] == ["NVFP4"] * 4 + ["BF16"] * 3
    assert {s: v for s, v in losses("runs/b").items() if s <= 4} == losses("runs/a")
    assert "is finished" in cli(*branch).out


def test_a_branch_does_not_land_on_another_run(cli: Cli) -> None:
    for name in ("a", "b"):
        cli.trained(f"run.name={name}", "train.steps=1")
    before = {p: p.read_bytes() for p in Path("runs/b").rglob("*") if p.is_file()}
    assert (
        "runs/b holds a run already" in cli("resume=runs/a", "run.name=b", "train.steps=2").message
    )
    assert {p: p.read_bytes() for p in Path("runs/b").rglob("*") if p.is_file()} == before


def test_a_resume_may_change_the_optimizers_constants(cli: Cli) -> None:
    for name in ("a", "b"):
        cli.trained(f"run.name={name}", "train.steps=2", "phases=none", "schedule=constant")
    assert cli("resume=runs/a", "train.steps=5").code == 0
    assert cli("resume=runs/b", "train.steps=5", "optim.weight_decay=50").code == 0
    assert losses("runs/a")[3] == losses("runs/b")[3], "decay acts in the step after"
    assert losses("runs/a")[5] != losses("runs/b")[5]


def test_a_run_without_checkpoints_cannot_be_resumed(cli: Cli, stop_at: StopAt) -> None:
    stop_at(2)
    assert cli("run.name=a").code == 137
    assert "has no checkpoint yet" in cli("resume=runs/a").message
    assert sorted(losses("runs/a")) == [1]


def test_what_is_resumed_cannot_be_another_run(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    assert (
        "train.seq_len: 32 → 16"
        in cli("resume=runs/a", "train.seq_len=16", "train.steps=2").message
    )
    assert "run.seed: 0 → 5" in cli("resume=runs/a", "run.seed=5", "train.steps=2").message
    assert "contradict" in cli("resume=runs/a", "run.overwrite=true").message
    assert (
        "name its recipe" in cli("resume=runs/a", "recipe.hadamard=false", "train.steps=2").message
    )
    assert "no experiment" in cli("resume=runs/a", "experiment=techniques", "train.steps=2").message
    assert sorted(losses("runs/a")) == [1]


def test_other_data_of_the_same_name_is_noticed(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_bytes(cli.text.read_bytes())
    assert cli("run.name=a", "train.steps=1", f"data.path={own}").code == 0
    own.write_text("something else " * 1000)
    assert "was trained on other data" in cli("resume=runs/a", "train.steps=2").message


def test_data_may_move(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_bytes(cli.text.read_bytes())
    assert cli("run.name=a", "train.steps=1", f"data.path={own}").code == 0
    own.unlink()
    assert "own.txt" in cli("resume=runs/a", "train.steps=2").message
    assert cli("resume=runs/a", "train.steps=2", f"data.path={cli.text}").code == 0


@pytest.mark.parametrize(
    "word",
    long_but(
        ("~phases.cooldown", "phases=none"),
        ("phases.cooldown=null", "~phases.cooldown", "phases=none"),
    ),
)
def test_a_run_goes_on_without_a_phase_that_is_left_out(cli: Cli, word: str) -> None:
    late = ("phases=cooldown_bf16", "phases.cooldown.start=3")
    cli.trained("run.name=a", "train.steps=2", "schedule=constant", "schedule.warmup=0", *late)
    assert cli("resume=runs/a", "train.steps=4", word).code == 0
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert saved["phases"] == {}
    assert [values[-1] for values in losses("runs/a").values()] == ["NVFP4"] * 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["phases.late.gemms=null"],
            "phases.late.start is missing in runs/a/config.yaml as this command changes it; "
            "phases.late.start=… sets it",
        ),
        (
            ["phases=none", "phases.cooldown.start=3"],
            "phases.cooldown.recipe is missing in runs/a/config.yaml as this command changes it; ",
        ),
        (["phases.late=null"], "unknown key 'phases.late' (known: cooldown)"),
        (["~policy.lst"], "unknown key 'policy.lst'; did you mean 'policy.last'?"),
        (["~eval.every"], "eval.every is missing in runs/a/config.yaml as this command"),
    ],
)
def test_what_a_resume_cannot_leave_out_is_said_with_what_sets_it(
    cli: Cli, words: list[str], message: str
) -> None:
    cli.trained("run.name=a", "train.steps=2", "schedule=constant", "schedule.warmup=0")
    assert cli("resume=runs/a", "train.steps=4", *words).message.startswith(message)


def test_keys_that_a_resume_leaves_out_have_their_defaults(cli: Cli) -> None:
    kept = ("policy.last=1", "phases.cooldown.gemms=[fprop]")
    run = cli.trained("run.name=a", "train.steps=2", "schedule=constant", *kept)
    words = ("~policy.last", "~phases.cooldown.gemms")
    assert cli("resume=runs/a", "run.name=b", "train.steps=3", *words).code == 0
    saved = yaml.safe_load((run.parent / "b/config.yaml").read_text())
    assert "last" not in saved["policy"] and "gemms" not in saved["phases"]["cooldown"]


def test_a_resume_reads_each_byte_of_its_checkpoint_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    files = {path.stat().st_ino: path for path in Path("runs/a/checkpoints").rglob("*.safetensors")}
    sizes = {path.name: path.stat().st_size for path in files.values()}
    counted = dict.fromkeys(sizes, 0)

    def counting(read: Any) -> Any:
        def call(descriptor: int, *arguments: Any) -> Any:
            result = read(descriptor, *arguments)
            path = files.get(os.fstat(descriptor).st_ino)
            if path is not None:
                counted[path.name] += result if isinstance(result, int) else len(result)
            return result

        return call

    for name in ("read", "pread", "preadv"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    before = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    assert cli("resume=runs/a", "train.steps=3").code == 0
    assert counted == sizes and all(sizes.values())
    held = [path for path in Path("/proc/self/fd").iterdir() if int(path.name) not in before]
    assert not [path for path in held if path.is_symlink() and "memfd" in os.readlink(path)]


def test_without_room_in_memory_a_checkpoint_is_verified_and_then_read(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    monkeypatch.setattr(find, "free_memory", lambda: None)
    monkeypatch.setattr(os, "memfd_create", lambda name: 1 // 0)
    assert cli("resume=runs/a", "train.steps=3").code == 0
