"""Distillation runs: a quantised student learns a teacher's distribution; resume to the bit; what
cannot be taught.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import Cli, lines, losses

from fp4train.exchange import load_trained

STUDENT = ("phases=none", "schedule=constant", "schedule.warmup=0", "policy=all")


@pytest.fixture
def teacher(cli: Cli) -> Path:
    """A run in BF16 that has learned something."""
    return cli.trained(
        "run.name=teacher", "recipe=bf16", "train.steps=30", "optim.lr=3e-3", *STUDENT
    )


def test_a_student_that_begins_as_its_teacher_has_no_loss_in_its_arithmetic(
    cli: Cli, teacher: Path
) -> None:
    assert (
        cli(
            "run.name=a",
            f"init={teacher}",
            f"teacher={teacher}",
            "recipe=fp32",
            *STUDENT,
            "train.steps=1",
        ).code
        == 0
    )
    assert abs(losses("runs/a")[1][0]) < 1e-6


@pytest.mark.long
def test_a_quantised_student_comes_nearer_to_its_teacher(cli: Cli, teacher: Path) -> None:
    words = ("recipe=nvfp4", "train.steps=40", "optim.lr=1e-3", "checkpoint.every=20")
    assert cli("run.name=a", f"init={teacher}", f"teacher={teacher}", *words, *STUDENT).code == 0
    found = [loss[0] for loss in losses("runs/a").values()]
    assert sum(found[-8:]) < 0.8 * sum(found[:8]) and all(loss > 0 for loss in found)
    # of the targets
    assert [line["val/loss"] for line in lines("runs/a") if "val/loss" in line][-1] > 1
    whole = losses("runs/a")
    assert cli.raw("resume=runs/a", "resume_step=20").code == 0
    assert losses("runs/a") == whole
    assert cli.raw(f"resume={teacher}", "train.steps=31").code == 0
    other = cli.raw("resume=runs/a", "resume_step=20")
    assert (
        other.code != 0
        and f"a teacher of other weights than teacher={teacher} has" in other.message
    )
    assert cli.raw("resume=runs/a", "resume_step=20", "teacher_step=30").code == 0
    assert losses("runs/a") == whole


@pytest.mark.long
def test_a_loss_near_zero_is_not_judged_by_its_own_size_and_a_rise_is_seen(
    cli: Cli, teacher: Path
) -> None:
    """The first step's loss is 1e-5: the rounding of a quantised step is many times that, and no
    divergence.
    """
    given = (
        f"init={teacher}",
        f"teacher={teacher}",
        "recipe=nvfp4",
        "train.steps=20",
        "checkpoint.every=5",
        *STUDENT,
    )
    quiet = cli("run.name=a", *given, "optim.lr=1e-3")
    assert (
        quiet.code == 0
        and "far above its past" not in quiet.err
        and Path("runs/a/checkpoints").is_dir()
    )
    assert max(loss[0] for loss in losses("runs/a").values()) > 2 * losses("runs/a")[1][0]
    loud = cli("run.name=b", *given, "optim.lr=3.0")
    assert "far above its past" in loud.err


def test_the_weight_of_the_targets_adds_their_loss(cli: Cli, teacher: Path) -> None:
    for name, ce in (("a", "0.0"), ("b", "1.0")):
        given = (
            f"init={teacher}",
            f"teacher={teacher}",
            "recipe=fp32",
            f"distillation.ce={ce}",
            "train.steps=1",
        )
        assert cli(f"run.name={name}", *given, *STUDENT).code == 0
    assert cli("run.name=c", f"init={teacher}", "recipe=fp32", "train.steps=1", *STUDENT).code == 0
    plain, both, targets = (losses(f"runs/{name}")[1][0] for name in "abc")
    assert both - plain == pytest.approx(targets, rel=1e-4)


def test_a_folder_of_hugging_face_teaches_as_the_run_that_it_is_of(cli: Cli, teacher: Path) -> None:
    assert cli.raw("export", str(teacher), "to=hf", "out=folder").code == 0
    for name, source in (("a", str(teacher)), ("b", "folder")):
        assert (
            cli(
                f"run.name={name}", f"teacher={source}", "recipe=bf16", "train.steps=3", *STUDENT
            ).code
            == 0
        )
    assert losses("runs/a") == losses("runs/b")


def test_a_teacher_may_be_of_another_shape(cli: Cli, teacher: Path) -> None:
    assert (
        cli(
            "run.name=a",
            f"teacher={teacher}",
            "model.width=64",
            "model.layers=1",
            "train.steps=2",
            *STUDENT,
        ).code
        == 0
    )
    assert losses("runs/a")[2][0] > 0


def test_the_teacher_changes_no_initial_weight(cli: Cli, teacher: Path) -> None:
    for name, given in (("a", (f"teacher={teacher}",)), ("b", ())):
        assert (
            cli(f"run.name={name}", *given, "train.steps=1", "optim.lr=1e-30", *STUDENT).code == 0
        )
    a, b = (load_trained(Path(f"runs/{name}")).model.state_dict() for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("teacher=gone",), "teacher=gone: "),
        (
            ("teacher_step=7",),
            "runs/teacher: runs/teacher/checkpoints has no checkpoint of step 7; it has 30",
        ),
        (("distillation.temperature=0",), "distillation.temperature=0"),
        pytest.param(("distillation.ce=-1",), "distillation.ce=-1", marks=pytest.mark.long),
        (("model.vocab_multiple=512",), "both need the same vocabulary"),
        pytest.param(
            ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300"),
            "its tokenizer is another than the run's",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_cannot_be_taught_is_refused(
    cli: Cli, teacher: Path, words: tuple[str, ...], said: str
) -> None:
    given = () if words[0].startswith("teacher=") else (f"teacher={teacher}",)
    found = cli("run.name=a", *given, *words, "train.steps=2")
    assert found.code == 1 and said in found.message and not Path("runs/a/metrics.jsonl").exists()
    if "tokenizer" not in said:
        assert said in cli("plan", *given, *words).message


@pytest.mark.parametrize(
    "words",
    [
        ("teacher=gone",),
        ("data/tokenizer=pretrained", "data.tokenizer.name=runs/other/tokenizer.json"),
    ],
)
def test_a_teacher_is_refused_before_data_is_read(
    cli: Cli, teacher: Path, words: tuple[str, ...]
) -> None:
    cli.trained("run.name=other", "data/tokenizer=bpe", "data.tokenizer.vocab_size=290")
    named = () if words[0].startswith("teacher=") else (f"teacher={teacher}",)
    outcome = cli("run.name=a", *named, *words, "data.cache_dir=read")
    assert outcome.code == 1 and outcome.message.startswith("teacher=")
    assert not Path("read").exists() and not Path("runs/a").exists()


def test_a_plan_compares_the_tokenizer_of_the_teacher(cli: Cli) -> None:
    bpe = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=290")
    run = cli.trained("run.name=of_words", *bpe)
    tokenizer = ("data/tokenizer=pretrained", f"data.tokenizer.name={run}/tokenizer.json")
    assert cli("plan", f"teacher={run}", *bpe).code == 0, "known when it is trained"
    assert "is another than the run's" in cli("plan", f"teacher={run}").message
    assert cli("plan", f"teacher={run}", *tokenizer, "device=cpu").code == 0


def test_weights_that_are_not_there_are_refused(cli: Cli, teacher: Path) -> None:
    shutil.rmtree(teacher / "checkpoints")
    assert f"teacher={teacher}: no checkpoint in" in cli("run.name=a", f"teacher={teacher}").message
    Path("empty").mkdir()
    Path("empty/config.json").write_text(json.dumps({"model_type": "bert"}))
    assert "teacher=empty: " in cli("run.name=a", "teacher=empty").message
