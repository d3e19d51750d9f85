"""Wrong configurations and data end with one message that helps, code 1, no traceback, and nothing
lost.
"""

import fcntl
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from command_line import Cli, losses

from fp4train.errors import UserError
from fp4train.run.record.directory import LOCK, locked

WRONG = {
    "an unknown recipe": (
        ["recipe=nvfp5"],
        "recipe=nvfp5: there is no such recipe; did you mean 'nvfp4'? (known: alto_mxfp4",
    ),
    "a recipe of one's own": (
        ["recipe=house"],
        "; one of your own: recipe=FILE.yaml, or --config-dir FOLDER)",
    ),
    "a group without its section": (["tokenizer=bpe"], "did you mean 'data/tokenizer'?"),
    "a number for an object": (["recipe.outliers=3"], "recipe.outliers=3 must be an Outlier"),
    "a name for a recipe in a section": (
        ["phases=cooldown_bf16", "phases.cooldown.recipe=mxfp8"],
        "phases.cooldown.recipe='mxfp8' must be a Recipe",
    ),
    "an unknown key": (["train.stepz=5"], "unknown key 'train.stepz'; did you mean 'train.steps'?"),
    "an added key": (["+train.foo=5"], "unknown key 'train.foo'"),
    "a removed key": (["~eval.every"], "eval.every is missing"),
    "a key of another recipe": (
        ["recipe=mxfp8", "recipe.hadamard=true"],
        "unknown key 'recipe.hadamard'",
    ),
    "a word for a number": (["train.steps=abc"], "train.steps='abc' must be a whole number"),
    "a fraction of a step": (["train.steps=1.5"], "train.steps=1.5 must be a whole number"),
    "a number for a truth": (["recipe.hadamard=3"], "recipe.hadamard=3 must be true or false"),
    "a word for a rate": (["optim.lr=fast"], "optim.lr='fast' must be a number"),
    "one beta": (["optim.betas=[0.9]"], "optim.betas=[0.9] must hold 2 values"),
    "no steps": (["train.steps=0"], "train.steps=0 must be at least 1"),
    "an empty batch": (["train.batch_size=0"], "train.batch_size=0 must be at least 1"),
    "a microbatch that does not divide": (
        ["train.microbatch=3"],
        "train.microbatch=3 does not divide train.batch_size=4",
    ),
    "heads that do not divide": (
        ["model.heads=3"],
        "model.width=32 is not divisible by model.heads=3",
    ),
    "an empty name": (["run.name=''"], "run.name must not be empty"),
    "an empty directory": (["run.dir="], "run.dir is empty: give a path; . is the working"),
    "a name that leads out of the runs": (
        ["run.name=../x"],
        "run.name='../x' must name a folder among the runs",
    ),
    "an unknown backend": (["backend=cuda"], "backend='cuda' is not one of auto, te, native"),
    "steps that no integer holds": (
        ["train.steps=99999999999999999999"],
        "train.steps is too large: it must lie within",
    ),
    "an unknown GPU": (
        ["gpu=H1000"],
        "gpu='H1000' is not a GPU whose peak rates are known; did you mean 'H100'?",
    ),
    "a device without kernels": (["device=meta"], "device='meta' is not one of auto, cpu, cuda"),
    "a model beyond the memory": (
        ["model.width=1000000", "model.heads=2"],
        "of float32, and this machine has ",
    ),
    "a model taken out": (
        ["~model"],
        "~model: the option of a group cannot be taken out; model=NAME chooses another",
    ),
    "a setting of Hydra": (
        ["hydra.sweeper.max_batch_size=3"],
        "hydra.sweeper.max_batch_size=3: settings of Hydra change nothing of a run, whose directory",
    ),
    "a value of a key that is taken out": (
        ["~train.ema=0.9"],
        "~train.ema=0.9: a key is taken out by ~train.ema alone",
    ),
    "a key that ends with a dot": (
        ["hydra.=3"],
        "hydra.=3: token recognition error at: '.'; write key=value",
    ),
    "a list that is null": (
        ["policy.keep=null"],
        "policy.keep=null must be a list: policy.keep=[] is an empty one",
    ),
    "a list for a section": (
        ["train=[1,2]"],
        "train=[1,2]: Cannot merge DictConfig with ListConfig",
    ),
    "a section with an unknown key": (
        ["train={steps: 2, batchsize: 1}"],
        "unknown key 'train.batchsize'; did you mean 'train.batch_size'?",
    ),
    "weights without a name": (["init="], "init= names no weights: init=RUN, or init=FOLDER"),
    "a key taken out that is not there": (
        ["~data.pth"],
        "unknown key 'data.pth'; did you mean 'data.path'?",
    ),
    "a flag that is like none": (["--foo"], "unknown flag --foo; keys are written without dashes"),
    "records instead of text": (
        ["data.path=a.jsonl"],
        "data.path=a.jsonl holds records, whose syntax would be trained on: data=hf "
        "data.column=text",
    ),
    "a path from home": (["data.path=~/texts"], "write data.path=$HOME/texts"),
    "a quote without its other": (
        ['run.name="a'],
        "special characters in quotes: 'run.name=\"…\"'",
    ),
    "an impossible share": (["policy.last=1.5"], "last=1.5 is a share above 1.0"),
    "a pattern that matches nothing": (
        ["policy.keep=[mlp.dwn]"],
        "policy.keep='mlp.dwn' matches no linear layer",
    ),
    "an impossible phase": (["phases.cooldown.start=late"], "start='late' must be a step"),
    "an impossible cooldown": (["schedule.cooldown=1.5"], "schedule.cooldown=1.5"),
    "a backward of codes that no product has": (
        ["recipe=bf16", "recipe.backward=dequantised"],
        "BF16 quantises neither x nor w in fprop",
    ),
    "an impossible rounding": (["recipe=mxfp8", "recipe.scale_rounding=up"], "scale_rounding='up'"),
    "missing data": (["data.path=/nowhere/text.txt"], "/nowhere/text.txt"),
    "text shorter than a sequence": (
        ["train.seq_len=100000"],
        "a sequence needs train.seq_len+1 = 100,001",
    ),
    "an odd value of ours": (["+model._target_=os.system"], "os.system"),
    "foreign code": (
        ["model._target_=os.system"],
        "model._target_='os.system' is no configuration class of fp4train",
    ),
    "a class of ours elsewhere": (
        ["model._target_=fp4train.optim.adamw.AdamW"],
        "an Architecture is needed",
    ),
    "a dangling interpolation": (["run.name=${nowhere}"], "nowhere"),
    "a run that is not there": (["resume=runs/nowhere"], "runs/nowhere is not a run directory"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_it_is_said_what_is_wrong_before_anything_is_written(
    cli: Cli, arguments: list[str], message: str
) -> None:
    ended = cli("run.name=a", *arguments)
    assert ended.code == 1
    assert message in ended.message
    assert not any(cli.folder.iterdir()), "the name is free for the command as it was meant"


BEYOND_ITS_TOKENIZER = (
    "data/tokenizer=bpe",
    "data.tokenizer.vocab_size=290",
    "policy.keep=[nothing]",
)


@pytest.mark.parametrize(
    ("before", "arguments"),
    [
        ((), ("run.name=a", *BEYOND_ITS_TOKENIZER)),
        ((), ("run.dir=deep/er/a", *BEYOND_ITS_TOKENIZER)),
        (("mine/notes.txt",), ("run.dir=mine", *BEYOND_ITS_TOKENIZER)),
        (("mine/notes.txt",), ("run.dir=mine/a/b", "data.path=/nowhere")),
    ],
    ids=["a run", "folders above it", "a folder with other files", "a folder in that"],
)
def test_a_refused_start_leaves_what_was_there(
    cli: Cli, before: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    for path in map(Path, before):
        path.parent.mkdir(parents=True)
        path.write_text("kept")
    assert cli(*arguments).code == 1
    assert tuple(str(path) for path in Path().rglob("*") if path.is_file()) == before
    assert [path for path in Path().rglob("*") if path.is_dir()] == sorted(
        {Path(path).parent for path in before}
    )


def test_a_refused_branch_leaves_nothing_and_a_refused_resume_changes_nothing(cli: Cli) -> None:
    run = cli.trained("run.name=a", *BEYOND_ITS_TOKENIZER[:2])
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for name in ((), ("run.name=b",)):
        assert cli(f"resume={run}", "train.steps=8", "policy.keep=[nothing]", *name).code == 1
        assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    assert not Path("runs/b").exists()


def test_a_start_takes_the_lock_that_a_refused_one_took_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is opened, then another process removes it with its own lock, and then it is
    locked.
    """
    refused = ExitStack()
    refused.enter_context(locked(tmp_path / "a"))
    lock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        refused.close()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path / "a"):
        (tmp_path / "a" / "config.yaml").touch()
        assert (tmp_path / "a" / LOCK).exists()
        with pytest.raises(UserError, match="is in use"), locked(tmp_path / "a"):
            raise AssertionError("two hold the lock")
    assert (tmp_path / "a" / LOCK).exists()


def test_a_refused_start_says_nothing_of_its_schedule(cli: Cli) -> None:
    ended = cli("run.name=a", "phases.cooldown.start=6", "train.seq_len=100000")
    assert ended.code == 1 and "never starts" not in ended.err


@pytest.mark.long
def test_a_model_whose_size_nobody_knows_beforehand_ends_where_the_memory_does(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4train.run.checks.check_memory", lambda model: None)
    ended = cli("run.name=a", "model.width=1000000", "model.heads=2")
    assert ended.code == 1 and "the memory is not enough: " in ended.message
    assert not Path("runs/a/config.yaml").exists()


def test_a_name_may_be_nested_and_another_place_is_the_directorys_to_say(cli: Cli) -> None:
    assert cli("run.name=study/a", "train.steps=1").code == 0
    assert cli("run.name=a", "run.dir=elsewhere/a", "train.steps=1").code == 0
    assert sorted(str(p.parent) for p in Path().rglob("config.yaml")) == [
        "elsewhere/a",
        "runs/study/a",
    ]


def test_keys_of_a_section_are_set_together(cli: Cli) -> None:
    assert cli("run.name=a", "train={steps: 2, on_divergence: stop}", "eval.every=0").code == 0
    assert sorted(losses("runs/a")) == [1, 2]
    saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
    assert saved["train"]["on_divergence"] == "stop" and saved["train"]["batch_size"] == 4


def test_a_key_that_only_the_class_has_can_be_set(cli: Cli) -> None:
    ended = cli("plan", "recipe.dtype=float32")
    assert ended.code == 0 and "FP32·FP32" in ended.out
    ended = cli("plan", "recipe=bf16_forward_nvfp4_backward", "recipe.hadamard=false")
    assert ended.code == 0 and "NVFP4(hadamard=False) with fprop in BF16" in ended.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["phases.cooldown.start=6"],
            "phase cooldown never starts: its first step would be 6 of a run of 6",
        ),
        (
            ["schedule=cosine"],
            "Cosine has no cooldown; phases.cooldown.start=0.8 names a share of the steps",
        ),
        (["schedule.warmup=6"], "schedule.warmup=6 takes all 6 steps"),
        (["schedule.cooldown=6"], "schedule.cooldown=6 takes all 6 steps"),
        (
            ["schedule.warmup=4", "schedule.cooldown=4"],
            "overlap in 6 steps: the cooldown begins at step 4",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_the_steps_is_said(
    cli: Cli, options: list[str], message: str
) -> None:
    ended = cli("plan", *options)
    assert ended.code == 0 and message in ended.err


def test_a_batch_beyond_the_memory_is_one_line(cli: Cli) -> None:
    said = cli("run.name=a", "train.batch_size=1000000000").message
    assert (
        said.startswith("runs/a: step 0 does not fit into memory: ")
        and "train.microbatch=500000000" in said
    )


def test_a_run_that_keeps_no_metrics_ends_without_a_false_complaint(cli: Cli) -> None:
    ended = cli("run.name=a", "train.steps=1", "track=none")
    assert (
        ended.code == 0
        and "track=none keeps no metrics" in ended.out
        and "not a run directory" not in ended.out
    )
    assert not Path("runs/a/metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train.batch_size=1e18"],
            "000 × train.seq_len=32 is 3.2e+19 tokens per step",
        ),
        (["train.seq_len=1e18"], "is 4e+18 tokens per step"),
        (["train.steps=1e9"], "train.steps=1000000000 must be at most 536870911"),
        (
            ["train.steps=5e8", "train.batch_size=2e10"],
            "× train.batch_size=20000000000 must be below 2**63",
        ),
        (["train.steps=" + "9" * 5000], "for integer string conversion"),
        (["optim.lr=" + "9" * 400], "optim.lr is too large"),
        (["checkpoint.keep=1e30"], "checkpoint.keep is too large: it must lie within ±(2**63 - 1)"),
        (["plan", "gpu=B200", "gpus=" + "9" * 30], "gpus is too large"),
    ],
)
def test_numbers_that_nothing_can_hold_are_refused(
    cli: Cli, arguments: list[str], message: str
) -> None:
    said = cli(*arguments).message
    assert message in said and len(said) < 600
    assert not Path("runs").exists()
