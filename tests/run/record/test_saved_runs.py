"""Run directories that are damaged, in use, or of another configuration: the message names them,
nothing is lost.
"""

import os
from pathlib import Path

import pytest
from command_line import Cli, StopAt, losses
from lengths import long_but

from fp4train.run.record import directory as run_directory
from fp4train.run.record.directory import SETTLED
from fp4train.text import as_written


def test_a_run_of_another_configuration_is_left_alone(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    before = {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()}
    said = cli("run.name=a", "train.steps=2", "model.hidden=96").message
    assert (
        "runs/a belongs to another configuration (train.steps: 1 → 2; model.hidden: 64 → 96)"
        in said
    )
    assert "choose another run.name, or run.overwrite=true" in said
    assert "goes on to that step" not in said
    longer = cli("run.name=a", "train.steps=2").message
    assert "(train.steps: 1 → 2): resume=runs/a train.steps=2 goes on to that step" in longer
    assert {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()} == before
    assert cli("run.name=a", "train.steps=2", "model.hidden=96", "run.overwrite=true").code == 0
    assert sorted(losses("runs/a")) == [1, 2]


def test_a_run_is_overwritten_only_by_one_that_is_possible(cli: Cli) -> None:
    assert (
        cli(
            "run.name=a", "train.steps=1", "data/tokenizer=bpe", "data.tokenizer.vocab_size=300"
        ).code
        == 0
    )
    before = {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()}
    for slip in ("data.path=/nowhere", "policy.keep=[nothing]", "train.seq_len=1000000"):
        assert cli("run.name=a", slip, "run.overwrite=true").code == 1
        assert {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()} == before
    other = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=290")
    assert cli("run.name=a", "train.steps=1", *other, "run.overwrite=true").code == 0
    assert (
        "290" in Path("runs/a/tokenizer_origin.json").read_text()
        and not Path("runs/a/.new").exists()
    )


def test_overwriting_takes_nothing_that_is_no_run(cli: Cli) -> None:
    Path("mine/checkpoints").mkdir(parents=True)
    Path("mine/checkpoints/precious").write_text("years of work")
    said = cli("run.name=a", "run.dir=mine", "run.overwrite=true").message
    assert "mine holds checkpoints but no config.yaml" in said
    assert Path("mine/checkpoints/precious").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("model: [", "cannot be read"),
        ("just text", "it has no section run"),
        (
            "model:\n  _target_: os.system\nrun: {}",
            "model._target_='os.system' is no configuration class",
        ),
        ("model:\n  _target_: fp4train.files.os.system\nrun: {}", "is no configuration class"),
        ("run: !!python/object/apply:os.system ['touch hit']", "cannot be read"),
        ("run:\n  name: ${oc.env:HOME}", "holds an interpolation"),
    ],
)
def test_a_saved_configuration_is_data(cli: Cli, damage: str, message: str) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(damage)
    for command in (
        ["resume=runs/a", "train.steps=2"],
        ["run.name=a", "train.steps=1"],
        ["plan", "resume=runs/a"],
    ):
        ended = cli(*command)
        assert ended.code == 1 and message in ended.message
    assert not Path("hit").exists()


def test_a_saved_option_that_is_no_more_is_named(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    path = Path("runs/a/config.yaml")
    body = path.read_text().partition("\n")[2]  # without the checksum, as in runs of older versions
    path.write_text(body.replace("  seq_len: 32\n", "  seq_len: 32\n  shuffle: 3\n"))
    said = cli("run.name=a", "train.steps=1").message
    assert (
        "runs/a belongs to another configuration (train.shuffle: 3 → no longer an option): "
        "choose another" in said
    )
    for verb in ("train", "plan"):
        said = cli(verb, "resume=runs/a", "train.steps=2").message
        assert said.startswith(
            "runs/a/config.yaml holds train.shuffle, which is no longer an option: take it out"
        )
    path.write_text(path.read_text().replace("  shuffle: 3\n", ""))
    assert "unknown key 'train.shufle'" in cli("resume=runs/a", "train.shufle=3").message, (
        "what is typed is no file's"
    )
    assert cli("resume=runs/a", "train.steps=2", *cli.paths).code == 0


@pytest.mark.parametrize("key", long_but(("audit.repeat",), SETTLED))
def test_a_key_that_went_is_read_with_the_value_that_every_run_has(cli: Cli, key: str) -> None:
    cli.trained("run.name=a", "train.steps=1")
    path = Path("runs/a/config.yaml")
    body = path.read_text().partition("\n")[2]  # without the checksum, as in runs of older versions
    section, _, name = key.partition(".")

    def saved_with(value: object) -> None:
        path.write_text(body.replace(f"{section}:\n", f"{section}:\n  {name}: {value}\n"))

    saved_with("17")
    said = cli("resume=runs/a", "train.steps=2", *cli.paths).message
    assert said.startswith(f"runs/a/config.yaml holds {key}, which is no longer an option: take it")
    saved_with(as_written(SETTLED[key][-1]))
    assert cli("run.name=a", "train.steps=1").code == 0
    assert cli("resume=runs/a", "train.steps=2", *cli.paths).code == 0
    assert f"  {name}:" not in path.read_text()


def test_a_truncated_checkpoint_falls_back_to_the_one_before_and_says_so(
    cli: Cli, stop_at: StopAt
) -> None:
    cli.trained("run.name=whole", "checkpoint.every=2")
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=2").code == 137
    stop_at(-1)
    tensors = Path("runs/a/checkpoints/step_00000004/tensors.safetensors")
    os.truncate(tensors, tensors.stat().st_size // 2)
    ended = cli("resume=runs/a")
    assert ended.code == 0
    assert "warning: checkpoint step_00000004 cannot be used (tensors.safetensors has" in ended.err
    assert "going on from step 2" in ended.err
    assert losses("runs/a") == losses("runs/whole")


def test_without_a_usable_checkpoint_every_one_is_named(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=2", "checkpoint.every=1").code == 0
    for state in Path("runs/a/checkpoints").glob("*/state.json"):
        state.write_text("{")
    said = cli("resume=runs/a", "train.steps=3").message
    assert (
        "step_00000002: state.json is damaged" in said
        and "step_00000001: state.json is damaged" in said
    )
    assert sorted(losses("runs/a")) == [1, 2], "its metrics are not touched"


def test_a_checkpoint_of_another_model_does_not_fit(cli: Cli) -> None:
    for name, width in (("a", 32), ("b", 64)):
        assert cli(f"run.name={name}", f"model.width={width}", "train.steps=1").code == 0
    before = Path("runs/a/metrics.jsonl").read_bytes()
    for path in Path("runs/a/checkpoints").rglob("*.*"):
        path.write_bytes((Path("runs/b") / path.relative_to("runs/a")).read_bytes())
    assert "is a checkpoint of run" in cli("resume=runs/a", "train.steps=2").message
    config = Path("runs/a/config.yaml")
    # a run from before runs had an identity
    config.write_text(config.read_text().partition("\n")[2])
    said = cli("resume=runs/a", "train.steps=2", *cli.paths).message
    assert "does not fit this model: embed.weight has shape [" in said
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


def test_a_run_directory_that_cannot_be_written(cli: Cli) -> None:
    Path("runs").write_text("a file")
    assert "runs/a cannot be written" in cli("run.name=a").message


def test_two_processes_do_not_train_in_one_directory(cli: Cli) -> None:
    with run_directory.locked(Path("runs/a")):
        assert "runs/a is in use: another process trains in it" in cli("run.name=a").message
