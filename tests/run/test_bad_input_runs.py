"""What a user gets wrong ends with one message that helps, a code other than 0, no traceback, and nothing lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, StopAt, events, losses

from fp4train import checkpoint
from fp4train.checkpoint import CheckpointError
from fp4train.errors import UserError
from fp4train.run.record import directory as run_directory
from fp4train.run.record.journal import chained_sum, read_swaps

WRONG = {
    "an unknown recipe": (
        ["recipe=nvfp5"],
        "recipe=nvfp5: there is no such recipe; did you mean 'nvfp4'? (known: bf16",
    ),
    "an unknown model": (["model=llama_tinny"], "did you mean 'llama_tiny'?"),
    "no recipe at all": (["recipe=null"], "there is no such recipe"),
    "an unknown key": (["train.stepz=5"], "unknown key 'train.stepz'; did you mean 'train.steps'?"),
    "an unknown section": (["trian.steps=5"], "unknown key 'trian.steps'; did you mean 'train.steps'?"),
    "an added key": (["+train.foo=5"], "unknown key 'train.foo'"),
    "an added section": (["+foo=5"], "unknown key 'foo'"),
    "a removed key": (["~eval.every"], "eval.every is missing"),
    "a removed section": (["~eval"], "eval is missing"),
    "a key of another recipe": (["recipe=mxfp8", "recipe.hadamard=true"], "unknown key 'recipe.hadamard'"),
    "a word for a number": (["train.steps=abc"], "train.steps='abc' must be a whole number"),
    "a fraction of a step": (["train.steps=1.5"], "train.steps=1.5 must be a whole number"),
    "a truth for a number": (["train.steps=true"], "train.steps=true must be a whole number"),
    "nothing for a number": (["train.steps=null"], "train.steps=null must be a whole number"),
    "a list for a number": (["train.steps=[1,2]"], "train.steps=[1, 2] must be a whole number"),
    "a number for a truth": (["recipe.hadamard=3"], "recipe.hadamard=3 must be true or false"),
    "a word for a rate": (["optim.lr=fast"], "optim.lr='fast' must be a number"),
    "no number": (["optim.weight_decay=nan"], "optim.weight_decay=nan must be finite"),
    "a number for a section": (["optim=3"], "there is no such optim"),
    "one beta": (["optim.betas=[0.9]"], "optim.betas=[0.9] must hold 2 values"),
    "no steps": (["train.steps=0"], "train.steps=0 must be at least 1"),
    "negative steps": (["train.steps=-3"], "train.steps=-3 must be at least 1"),
    "an empty batch": (["train.batch_size=0"], "train.batch_size=0 must be at least 1"),
    "a microbatch that does not divide": (
        ["train.microbatch=3"],
        "train.microbatch=3 does not divide train.batch_size=4",
    ),
    "no microbatch": (["train.microbatch=0"], "train.microbatch=0"),
    "heads that do not divide": (["model.heads=3"], "model.width=32 is not divisible by model.heads=3"),
    "an evaluation of nothing": (["eval.batches=0"], "eval.batches=0 must be at least 1"),
    "negative evaluations": (["eval.every=-1"], "eval.every=-1"),
    "no checkpoints kept": (["checkpoint.keep=0"], "checkpoint.keep=0 must be at least 1"),
    "a negative seed": (["run.seed=-1"], "run.seed=-1"),
    "an empty name": (["run.name=''"], "run.name must not be empty"),
    "a name that leads out of the runs": (["run.name=../x"], "run.name='../x' must name a folder among the runs"),
    "a name that leads out by a detour": (["run.name=a/../../x"], "for another place give run.dir=…"),
    "a path for a name": (["run.name=/nowhere/x"], "run.name='/nowhere/x' must name a folder among the runs"),
    "all runs for a name": (["run.name=."], "run.name='.' must name a folder among the runs"),
    "an unknown backend": (["backend=cuda"], "backend='cuda' is not one of auto, te, native"),
    "steps beyond counting": (["train.steps=9999999999999"], "must be at most 536870911"),
    "steps that no integer holds": (["train.steps=99999999999999999999"], "train.steps=1e+20 must lie within"),
    "an unknown GPU": (["gpu=H1000"], "gpu='H1000' is not a GPU whose peak rates are known; did you mean 'H100'?"),
    "a device without kernels": (["device=meta"], "device='meta' is not one of auto, cpu, cuda"),
    "a model beyond the memory": (["model.width=1000000", "model.heads=2"], "of float32, and this machine has "),
    "a model taken out": (["~model"], "~model: a run needs a model; model=NAME chooses another"),
    "a setting that Hydra lacks": (["hydra.foo=1"], "hydra.foo=1: Hydra has no such setting"),
    "a launcher that is not there": (["hydra/launcher=joblib"], "hydra/launcher=joblib: Hydra has no such setting"),
    "records instead of text": (
        ["data.path=a.jsonl"],
        "data.path=a.jsonl holds records, whose syntax would be trained on: data=hf data.path=a.jsonl data.column=text",
    ),
    "records in a .json file": (["data.path=a.json"], "data.path=a.json holds records"),
    "a name without its quotes": (["run.name=ünï"], """a value with the character ü needs quotes: 'run.name="ünï"'"""),
    "an unknown device": (["device=gpu0"], "device='gpu0' is not one of auto, cpu, cuda"),
    "an impossible share": (["policy.last=1.5"], "last=1.5 is a share above 1.0"),
    "a word for a share": (["policy.last=most"], "policy.last='most' must be"),
    "a pattern that matches nothing": (["policy.keep=[mlp.dwn]"], "policy.keep='mlp.dwn' matches no linear layer"),
    "an impossible phase": (["phases.cooldown.start=late"], "start='late' must be a step"),
    "a phase of other GEMMs": (["phases.cooldown.gemms=[forward]"], "name some of fprop, dgrad, wgrad"),
    "an impossible cooldown": (["schedule.cooldown=1.5"], "schedule.cooldown=1.5"),
    "an impossible rounding": (["recipe=mxfp8", "recipe.scale_rounding=up"], "scale_rounding='up'"),
    "missing data": (["data.path=/nowhere/text.txt"], "/nowhere/text.txt"),
    "no data": (["data.path=null"], "data.path=null must be text"),
    "text shorter than a sequence": (["train.seq_len=100000"], "a sequence needs train.seq_len+1 = 100,001"),
    "an odd value of ours": (["+model._target_=os.system"], "os.system"),
    "foreign code": (["model._target_=os.system"], "model._target_='os.system' is no configuration class of fp4train"),
    "foreign code of our name": (
        ["recipe._target_=fp4train.files.os.system"],
        "is no configuration class of fp4train",
    ),
    "a class of ours elsewhere": (
        ["model._target_=fp4train.optim.adamw.AdamW"],
        "an Architecture is needed",
    ),
    "an unclosed bracket": (["policy.keep=[a"], "write key=value"),
    "a dangling interpolation": (["run.name=${nowhere}"], "nowhere"),
    "a run that is not there": (["resume=runs/nowhere"], "runs/nowhere is not a run directory"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_it_is_said_what_is_wrong_before_anything_is_written(cli: Cli, arguments: list[str], message: str) -> None:
    ended = cli("run.name=a", *arguments)
    assert ended.code == 1
    assert message in ended.message
    assert not Path("runs/a/config.yaml").exists(), "the name is free for the command as it was meant"
    assert {p.name for p in cli.folder.iterdir()} <= {"runs"} and not Path("runs/config.yaml").exists()


def test_a_model_whose_size_nobody_knows_beforehand_ends_where_the_memory_does(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4train.run.checks.check_memory", lambda shape, vocab_size: None)
    ended = cli("run.name=a", "model.width=1000000", "model.heads=2")
    assert ended.code == 1 and "the memory is not enough: " in ended.message
    assert not Path("runs/a/config.yaml").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty"), ("too short", "a sequence needs"), (b"\xff\xfe\xfa" * 50, "UTF-8")],
    ids=["empty", "short", "binary"],
)
def test_a_file_that_holds_no_text_to_learn_from(cli: Cli, tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "odd.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = cli("run.name=a", f"data.path={path}").message
    assert message in said or "a sequence needs" in said


def test_a_command_with_a_slip_can_be_given_again_without_it(cli: Cli) -> None:
    assert cli("run.name=a", "data.path=/nowhere").code == 1
    assert cli("run.name=a", "train.steps=1").code == 0


def test_a_name_may_be_nested_and_another_place_is_the_directorys_to_say(cli: Cli) -> None:
    assert cli("run.name=study/a", "train.steps=1").code == 0
    assert cli("run.name=a", "run.dir=elsewhere/a", "train.steps=1").code == 0
    assert sorted(str(p.parent) for p in Path().rglob("config.yaml")) == ["elsewhere/a", "runs/study/a"]


def test_a_run_of_another_configuration_is_left_alone(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    before = {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()}
    said = cli("run.name=a", "train.steps=2", "model.hidden=96").message
    assert "runs/a belongs to another configuration (train.steps: 1 → 2; model.hidden: 64 → 96)" in said
    assert "choose another run.name, or run.overwrite=true" in said
    assert {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()} == before
    assert cli("run.name=a", "train.steps=2", "model.hidden=96", "run.overwrite=true").code == 0
    assert sorted(losses("runs/a")) == [1, 2]


def test_a_run_is_overwritten_only_by_one_that_is_possible(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=1", "data/tokenizer=bpe", "data.tokenizer.vocab_size=300").code == 0
    before = {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()}
    for slip in ("data.path=/nowhere", "policy.keep=[nothing]", "train.seq_len=1000000"):
        assert cli("run.name=a", slip, "run.overwrite=true").code == 1
        assert {p: p.read_bytes() for p in Path("runs/a").rglob("*") if p.is_file()} == before
    other = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=290")
    assert cli("run.name=a", "train.steps=1", *other, "run.overwrite=true").code == 0
    assert "290" in Path("runs/a/tokenizer_origin.json").read_text() and not Path("runs/a/.new").exists()


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
        ("model:\n  _target_: os.system\nrun: {}", "model._target_='os.system' is no configuration class"),
        ("model:\n  _target_: fp4train.files.os.system\nrun: {}", "is no configuration class"),
        ("run: !!python/object/apply:os.system ['touch hit']", "cannot be read"),
        ("run:\n  name: ${oc.env:HOME}", "holds an interpolation"),
    ],
)
def test_a_saved_configuration_is_data(cli: Cli, damage: str, message: str) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(damage)
    for command in (["resume=runs/a", "train.steps=2"], ["run.name=a", "train.steps=1"], ["plan", "resume=runs/a"]):
        ended = cli(*command)
        assert ended.code == 1 and message in ended.message
    assert not Path("hit").exists()


def test_a_saved_option_that_is_no_more_is_named(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    path = Path("runs/a/config.yaml")
    body = path.read_text().partition("\n")[2]  # without the checksum, as in runs of older versions
    path.write_text(body.replace("  seq_len: 32\n", "  seq_len: 32\n  shuffle: 3\n"))
    said = cli("run.name=a", "train.steps=1").message
    assert "runs/a belongs to another configuration (train.shuffle: 3 → no longer an option): choose another" in said
    for verb in ("train", "plan"):
        said = cli(verb, "resume=runs/a", "train.steps=2").message
        assert said.startswith("runs/a/config.yaml holds train.shuffle, which is no longer an option: take it out")
    path.write_text(path.read_text().replace("  shuffle: 3\n", ""))
    assert "unknown key 'train.shufle'" in cli("resume=runs/a", "train.shufle=3").message, "what is typed is no file's"
    assert cli("resume=runs/a", "train.steps=2", *cli.paths).code == 0


def test_a_run_that_was_saved_with_the_precision_of_the_norm_goes_on_without_it(cli: Cli) -> None:
    """The key is gone: the norm is summed in float64 on any number of ranks."""
    cli.trained("run.name=a", "train.steps=1")
    path, record = Path("runs/a/config.yaml"), Path("runs/a/history.jsonl")
    body = path.read_text().partition("\n")[2]
    assert "\n  norm:" not in body
    path.write_text(body.replace("parallel:\n", "parallel:\n  norm: auto\n"))
    line = json.loads(record.read_text())
    line["config"]["parallel"]["norm"] = "auto"
    record.write_text(json.dumps({**line, "sum": chained_sum(line, "")}) + "\n")
    ended = cli("resume=runs/a", "train.steps=2", *cli.paths)
    assert ended.code == 0, ended.message
    assert "runs/a/config.yaml: parallel.norm=auto is dropped: the gradient norm is summed in float64" in ended.err
    assert "\n  norm:" not in path.read_text()
    again = cli("resume=runs/a", "train.steps=3")
    assert again.code == 0 and "dropped" not in again.err
    said = cli("run.name=b", "parallel.norm=float64").message
    assert said.startswith("unknown key 'parallel.norm': the gradient norm is summed in float64 on any number of ranks")


def test_damaged_records_of_swaps_are_named(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    Path("runs/a/swaps.json").write_text('[{"step": 0, "name": "x", "recipe": {"_target_": "os.system"}}]')
    said = cli("resume=runs/a", "train.steps=2").message
    assert "swaps.json is not what the checkpoint of step 1 was trained with" in said
    Path("runs/a/swaps.json").write_text("[")
    said = cli("resume=runs/a", "train.steps=2").message
    assert said.startswith("runs/a/swaps.json cannot be read: ")
    assert said.endswith("; remove the file to go on with the swaps of the checkpoint")
    Path("runs/a/swaps.json").write_text('[{"step": 0, "name": "x", "recipe": {"_target_": "os.system"}}]')
    shutil.rmtree("runs/a/checkpoints")
    said = cli("plan", "resume=runs/a", "train.steps=2").message
    assert "no checkpoint" in said
    with pytest.raises(UserError, match=r"swaps.json cannot be read: recipe._target_='os.system'"):
        read_swaps(Path("runs/a"))


def test_a_truncated_checkpoint_falls_back_to_the_one_before_and_says_so(cli: Cli, stop_at: StopAt) -> None:
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
    assert "step_00000002: state.json is damaged" in said and "step_00000001: state.json is damaged" in said
    assert sorted(losses("runs/a")) == [1, 2], "its metrics are not touched"


def test_a_checkpoint_of_another_model_does_not_fit(cli: Cli) -> None:
    for name, width in (("a", 32), ("b", 64)):
        assert cli(f"run.name={name}", f"model.width={width}", "train.steps=1").code == 0
    before = Path("runs/a/metrics.jsonl").read_bytes()
    for path in Path("runs/a/checkpoints").rglob("*.*"):
        path.write_bytes((Path("runs/b") / path.relative_to("runs/a")).read_bytes())
    assert "is a checkpoint of run" in cli("resume=runs/a", "train.steps=2").message
    config = Path("runs/a/config.yaml")
    config.write_text(config.read_text().partition("\n")[2])  # a run from before runs had an identity
    said = cli("resume=runs/a", "train.steps=2", *cli.paths).message
    assert "does not fit this model: embed.weight has shape [" in said
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint.save

    def save(folder: Path, step: int, *rest: Any, **options: Any) -> Path:
        if step == 4:
            raise CheckpointError("checkpoint of step 4 not written to runs/a: No space left on device.")
        return original(folder, step, *rest, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    ended = cli("run.name=a", "checkpoint.every=2")
    assert ended.code == 0 and "error: checkpoint of step 4 not written" in ended.err
    assert "No space left" in events("runs/a", "checkpoint failed")[0]["reason"]
    assert checkpoint.steps(Path("runs/a/checkpoints")) == [5, 6], "the one that failed was tried again"


def test_a_run_whose_last_checkpoint_is_lost_does_not_end_well(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*rest: Any, **options: Any) -> Path:
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr(checkpoint, "save", save)
    ended = cli("run.name=a", "train.steps=2")
    assert ended.code == 1 and "No space left" in ended.err and "not saved" in ended.out


def test_a_run_directory_that_cannot_be_written(cli: Cli) -> None:
    Path("runs").write_text("a file")
    assert "runs/a cannot be written" in cli("run.name=a").message


def test_two_processes_do_not_train_in_one_directory(cli: Cli) -> None:
    with run_directory.locked(Path("runs/a")):
        assert "runs/a is in use: another process trains in it" in cli("run.name=a").message


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fp4train", "plan"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0 and ended.stderr == ""
    os.close(write)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pln"], "unknown verb 'pln'; did you mean 'plan'?"),
        (["compare", "runs/a"], "compare needs two or more run directories"),
        (["compare", "runs/a", "runs/b"], "runs/a is not a run directory"),
        (["formats", "e2m1"], "formats takes no arguments"),
        (["plan", "model=llama_9b"], "there is no such model; did you mean 'llama_8b'?"),
        (["plan", "data=text"], "data.path must be given: data.path=…"),
        (["plan", "data=tokens", "data.path=x"], "data.vocab_size must be given"),
        (["plan", "--config-dir", "nowhere"], "--config-dir nowhere: there is no such folder"),
        (
            ["plan", "data/tokenizer=bpe", "data.tokenizer.vocab=9"],
            "did you mean 'data.tokenizer.vocab_size'?",
        ),
        (["plan", "data=tokens", "data/tokenizer=bpe"], "data/tokenizer"),
        (["experiment=techniqes"], "did you mean 'techniques'?"),
        (["recipe@x=bf16"], "'recipe@x=bf16': a group has one place in the configuration, without @: recipe=bf16"),
        (["recipe", "bf16"], "unknown verb 'recipe'; did you mean recipe=bf16?"),
        (["resume", "runs/a"], "unknown verb 'resume'; did you mean resume=runs/a?"),
        (["resume="], "resume= names no run"),
        (["--recipe=bf16"], "--recipe=bf16: keys are written without dashes, recipe=bf16"),
        (["--recipe", "bf16"], "--recipe: keys are written without dashes, recipe=…"),
        (["-train.steps=5"], "keys are written without dashes, train.steps=5"),
        (["--config-name", "foo"], "--config-name: fp4train has one configuration"),
        (["--config-path", "foo"], "--config-path: fp4train has one configuration"),
        (["-x"], "unknown flag -x"),
        (["--steps", "5"], "unknown flag --steps; keys are written without dashes: train.steps=…"),
        (["track.foo=1"], "did you mean 'track.mode'?"),
        (["--cfg", "job", "resume=runs/a"], "runs/a/config.yaml is the configuration of the run"),
        (["recipe", "=", "bf16"], "unknown verb 'recipe'"),
        (["train", "recipe=bf16,mxfp8"], "recipe=bf16,mxfp8 holds several values: -m sweeps over them"),
        (["policy.keep=a,b"], "a list has brackets, policy.keep=[…]"),
        (["-m", "recipe=bf16,"], "'recipe=bf16,': mismatched input '<EOF>'; write key=value"),
        (["lr=0.1"], "unknown key 'lr'; did you mean 'optim.lr'?"),
        (["train.lr=0.1"], "unknown key 'train.lr'; did you mean 'optim.lr'? (known: steps, batch_size"),
        (["train.grad_accum=4"], "'train.grad_accum'; did you mean 'train.microbatch'? (sequences per forward pass"),
        (["learning_rate=1e-3"], "unknown key 'learning_rate'; did you mean 'optim.lr'?"),
        (["--learning-rate=1e-3"], "unknown flag --learning-rate; did you mean 'optim.lr'?"),
        (["model.dropout=0.1"], "unknown key 'model.dropout': the models here have no dropout (known: width"),
        (["recipe=fp8"], "did you mean fp8_block, fp8_current, fp8_delayed or fp8_row?"),
        (["recipe.element=e2m1"], "unknown key 'recipe.element'; did you mean 'recipe.dtype'? (known: hadamard"),
        (["-m", "resume=runs/a", "recipe=bf16,mxfp8"], "of resume=runs/a at each point: name them, run.name=…"),
        (["plan", "gpu=H20"], "gpu='H20' is not a GPU whose peak rates are known; did you mean 'H200'?"),
        (["plan", "--config-dir"], "--config-dir needs a folder"),
        (["swap"], "swap needs one run directory: fp4train swap RUN recipe=NAME [at=STEP]"),
        (["swap", "resume=runs/a", "recipe=bf16"], "swap needs one run directory"),
        (["compare", "runs/a", "runs/b", "--out=gap.png"], "compare knows no flag --out=gap.png"),
        (["compare", "runs/a", "runs/b", "out="], "out=: the name must end in .png or .csv or .json"),
        (["compare", "runs/a", "runs/b", "out=gap.pdf"], "out=gap.pdf: the name must end in .png or .csv or .json"),
    ],
)
def test_verbs_explain_themselves(cli: Cli, arguments: list[str], message: str) -> None:
    ended = cli.raw(*arguments)
    assert ended.code == 1 and message in ended.message


def test_what_is_near_a_run_directory_is_told_from_one(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    below = "runs/a/checkpoints/step_00000001"
    assert cli(f"resume={below}").message == f"{below} is not a run directory, it lies in one: runs/a"
    assert "no key=value; a run goes on with resume=runs/a" in cli.raw("train", "runs/a").message
    said = cli.raw("compare", "runs/a", "runs/aa").message
    assert said == "runs/aa is not a run directory: there is no such folder; did you mean 'a'?"
    assert "it is a file" in cli.raw("compare", "runs/a", "runs/a/metrics.jsonl").message


def test_branches_of_a_sweep_over_a_resumed_run_are_named(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2")
    assert cli("-m", "resume=runs/a", "recipe=bf16,mxfp8", "train.steps=3", "run.name=b").code == 0
    assert sorted(p.name for p in Path("runs").glob("[!.]*")) == ["a", "b-recipe=bf16", "b-recipe=mxfp8"]


def test_a_key_that_only_the_class_has_can_be_set(cli: Cli) -> None:
    ended = cli("plan", "recipe.dtype=float32")
    assert ended.code == 0 and "FP32·FP32" in ended.out
    ended = cli("plan", "recipe=bf16_forward_nvfp4_backward", "recipe.hadamard=false")
    assert ended.code == 0 and "NVFP4(hadamard=False) with fprop in BF16" in ended.out


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.parquet", b"PAR1" + bytes(64), "Parquet magic bytes not found in footer"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": brok', "JSON parse error"),
    ],
    ids=["parquet", "JSON lines"],
)
def test_a_data_file_that_is_cut_off_is_one_line(cli: Cli, name: str, content: bytes, reason: str) -> None:
    Path(name).write_bytes(content)
    tiny = [word for word in cli.tiny() if not word.startswith("data")]
    ended = cli.raw(*tiny, "run.name=a", "data=hf", f"data.path={name}", "data.cache_dir=cache")
    assert ended.code == 1 and f"{name} cannot be read: " in ended.message and reason in ended.message
    assert len(ended.err.splitlines()) == 1 and ended.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["phases.cooldown.start=6"], "phase cooldown never starts: its first step would be 6 of a run of 6"),
        (["schedule.warmup=6"], "schedule.warmup=6 takes all 6 steps"),
        (["schedule.cooldown=6"], "schedule.cooldown=6 takes all 6 steps"),
        (["schedule.warmup=4", "schedule.cooldown=4"], "overlap in 6 steps: the cooldown begins at step 4"),
    ],
)
def test_a_schedule_that_does_not_fit_the_steps_is_said(cli: Cli, options: list[str], message: str) -> None:
    ended = cli("plan", *options)
    assert ended.code == 0 and message in ended.err
    assert cli("plan").err == ""


def test_a_batch_beyond_the_memory_is_one_line(cli: Cli) -> None:
    said = cli("run.name=a", "train.batch_size=1000000000").message
    assert said.startswith("runs/a: step 0 does not fit into memory: ") and "train.microbatch=500000000" in said


def test_a_run_that_keeps_no_metrics_ends_without_a_false_complaint(cli: Cli) -> None:
    ended = cli("run.name=a", "train.steps=1", "track=none")
    assert ended.code == 0 and "track=none keeps no metrics" in ended.out and "not a run directory" not in ended.out


def test_a_folder_that_cannot_be_read_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> list[int]:
        raise PermissionError(13, "Permission denied", str(folder))

    cli.trained("run.name=a", "train.steps=1")
    monkeypatch.setattr(checkpoint, "steps", refuse)
    assert cli("resume=runs/a", "train.steps=2").message == "runs/a/checkpoints: Permission denied"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train.batch_size=1e18"],
            "000 × train.seq_len=32 is 3.2e+19 tokens per step",
        ),
        (["train.batch_size=1e18", "train.microbatch=1"], "is 3.2e+19 tokens per step, and at most 1.1e+12"),
        (["train.seq_len=1e18"], "is 4e+18 tokens per step"),
        (["train.steps=1e9"], "train.steps=1000000000 must be at most 536870911"),
        (["train.steps=5e8", "train.batch_size=2e10"], "× train.batch_size=20000000000 must be below 2**63"),
        (["train.steps=" + "9" * 5000], "for integer string conversion"),
        (["optim.lr=" + "9" * 400], "optim.lr is too large"),
        (["data.val=" + "9" * 400], "data.val is too large"),
        (["model.layers=" + "9" * 400], "model.layers is too large"),
        (["checkpoint.keep=1e30"], "checkpoint.keep=1e+30 must lie within ±(2**63 - 1)"),
        (["plan", "gpu=B200", "gpus=" + "9" * 30], "is more than 1048576"),
    ],
)
def test_numbers_that_nothing_can_hold_are_refused(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in cli(*arguments).message
    assert not Path("runs").exists()
