"""Messages about keys and folders that are nearly right, and what a command takes from the run that
it begins with.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command_line import TINY, Cli, Outcome, reading

Call = Callable[..., Outcome]


@pytest.fixture
def call(cli: Cli) -> Call:
    return cli.raw


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["recipe=mxfp8", "recipe.hadamard=true"],
            "'recipe.hadamard': it is one of recipe=averis, ",
            marks=pytest.mark.long,
        ),
        (["optim.momentum=1"], "unknown key 'optim.momentum': it is one of optim=muon, optim=sgd"),
        pytest.param(
            ["data.tokenizer.vocab_size=4"],
            "it is one of data/tokenizer=bpe",
            marks=pytest.mark.long,
        ),
        (["recipe.hadamrd=true"], "did you mean 'recipe.hadamard'?"),
        (["data.pth=x"], "unknown key 'data.pth'; did you mean 'data.path'? (known: "),
        (["model.num_expert=4"], "did you mean 'model.experts'? (known: "),
        pytest.param(
            ["data.tokenizer.nme=x"],
            "did you mean 'data.tokenizer.name'? (known: ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["optim.momentumm=1"], "did you mean 'optim.momentum'? (known: ", marks=pytest.mark.long
        ),
        (["model.foo=1"], "unknown key 'model.foo' (known: "),
        (["audit.repeat=1"], "'audit.repeat': steps are no longer computed twice: audit.every=1"),
    ],
)
def test_a_key_of_another_option_is_told_whose_it_is(
    call: Call, words: list[str], message: str
) -> None:
    assert message in call("plan", *words).message


@pytest.mark.parametrize(
    "words",
    [
        ["init="],
        ["init=''"],
        ['init=" "'],
        ["++init="],
        ["teacher="],
        ["teacher=''"],
        ["-m", "init=a,''"],
    ],
)
def test_an_empty_name_of_weights_is_not_a_run_without_them(call: Call, words: list[str]) -> None:
    """A shell leaves one where a variable is not set."""
    outcome = call(*TINY, *words)
    kind = "weights" if "init" in words[-1] else "model"
    key = "init" if "init" in words[-1] else "teacher"
    assert outcome.code
    assert f"{key}= names no {kind}: {key}=RUN, or {key}=FOLDER of Hugging Face" in outcome.err


def test_a_folder_that_is_not_there_is_looked_for_beside_it(
    call: Call, text: Path, small_run: Path
) -> None:
    wrong = str(small_run.parent / "smal")
    message = call(*TINY, f"data.path={text}", f"init={wrong}").message
    assert message == f"init={wrong}: there is no such folder; did you mean {str(small_run)!r}?"
    Path("runs").mkdir(exist_ok=True)
    made = ("init=runs/nothere", "run.name=nother")
    message = call(*TINY, f"data.path={text}", *made).message
    assert "hf download" not in message and "did you mean" not in message


def test_a_file_in_the_place_of_a_folder_of_weights_is_no_run_directory(
    call: Call, text: Path, small_run: Path
) -> None:
    begin = (*TINY, f"data.path={text}")
    message = call(*begin, f"init={text}").message
    assert message == (
        f"init: {text} is not a run directory (it has no config.yaml); a Hugging Face folder would "
        "have a config.json"
    )
    metrics = small_run / "metrics.jsonl"
    message = call(*begin, f"init={metrics}").message
    assert f"{metrics} is not a run directory, it lies in one: {small_run}" in message
    message = call(*begin, f"teacher={text}").message
    assert f"teacher={text}: {text} is not a run directory (it has no config.yaml)" in message


def test_a_run_that_begins_with_another_has_its_model_and_tokenizer(
    call: Call, text: Path, small_run: Path
) -> None:
    other = [word for word in TINY if not word.startswith(("model.", "train.steps"))]
    paths = reading(text)
    assert call(*other, *paths, "train.steps=1", f"init={small_run}", "run.name=next").code == 0
    saved = yaml.safe_load(Path("runs/next/config.yaml").read_text("utf-8"))
    before = yaml.safe_load((small_run / "config.yaml").read_text("utf-8"))
    assert saved["model"] == before["model"] and saved["model"]["width"] == 32
    message = call(
        *other, *paths, f"init={small_run}", "model=llama_tiny", "run.name=third"
    ).message
    assert f"model=llama_tiny contradicts init={small_run}" in message


def test_a_whole_number_that_is_written_otherwise_is_shown_as_one(call: Call) -> None:
    shown = yaml.safe_load(
        call("--cfg", "job", "train.steps=1e3", "optim.lr=1e-3", "run.seed=2.0").out
    )
    assert repr(shown["train"]["steps"]) == "1000" and repr(shown["run"]["seed"]) == "2"
    assert shown["optim"]["lr"] == 0.001
    assert "train.steps=1.5 must be a whole number" in call("plan", "train.steps=1.5").message
