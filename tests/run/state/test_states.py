"""The list of states says what a run keeps: bytes as in its checkpoints, and every tensor by a name
of the model.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
from command_line import STEADY, Cli

from fp4train import checkpoint
from fp4train.config import to_config
from fp4train.run.build import build_model
from fp4train.run.record.directory import read_config
from fp4train.run.state.numbers import LossHistory
from fp4train.run.states import STATES, WEIGHT_KINDS, bytes_per_parameter

WATCHED = ("oscillation.every=4", "oscillation.watch=3", "policy=all", "recipe=tetrajet_v2")
KEPT_WEIGHTS = [state.option for state in WEIGHT_KINDS.values()]
"""Options with which a run keeps all kinds of weights."""


@pytest.mark.parametrize(
    "options",
    [
        (),
        *((option,) for option in KEPT_WEIGHTS),
        ("optim.moments=bfloat16",),
        ("optim=sgd",),
        ("optim=sgd", "optim.momentum=0"),
        ("optim=muon",),
        ("optim=muon", "optim.moments=bfloat16"),
    ],
)
def test_the_plan_counts_the_bytes_that_a_checkpoint_has(
    cli: Cli, options: tuple[str, ...]
) -> None:
    run = cli.trained("run.name=a", "train.steps=2", *options, *STEADY)
    sizes: Counter[str] = Counter()
    stored = checkpoint.load(run / "checkpoints").tensors
    shapes = {name.removeprefix("model/"): stored.shape(name) for name in stored}
    parameters = 0
    for path in stored:
        key, name, *_ = path.split("/")
        if name in shapes and stored.shape(path) == shapes[name] and name != "head.weight":
            sizes[key] += stored[path].nbytes
            parameters += stored[path].numel() if key == "model" else 0
    config = to_config(read_config(run))
    model = build_model(config, len(stored["model/embed.weight"]), torch.device("meta"))
    planned = bytes_per_parameter(config, model)
    counted = {state.title: size for state in STATES if (size := sizes[state.key])}
    assert counted == {title: round(size * parameters) for title, size in planned.items()}


def test_what_is_kept_goes_by_names_of_the_model_and_is_placed_by_them(cli: Cli) -> None:
    run = cli.trained("run.name=a", "train.steps=6", *KEPT_WEIGHTS, *WATCHED, *STEADY)
    stored = checkpoint.load(Path(run) / "checkpoints")
    names = set(stored.state["model"])  # type: ignore[arg-type]
    assert {state.key for state in STATES} - {"data_place"} <= stored.state.keys()
    for key in ("optimizer", "oscillation", *WEIGHT_KINDS):
        table = stored.state[key]
        assert isinstance(table, dict) and table and table.keys() <= names, key


def test_states_are_checked_and_loaded_for_the_step_of_the_checkpoint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.trained("run.name=a", "train.steps=3", "checkpoint.every=2", "checkpoint.keep=9", *STEADY)
    steps: list[int] = []
    for method in ("check", "load"):
        monkeypatch.setattr(LossHistory, method, lambda state, saved: steps.append(state.run.step))
    assert cli("resume=runs/a", "resume_step=2", "run.name=b").code == 0
    assert steps == [2, 2]


def test_a_kind_of_weights_has_files_and_a_title_of_its_own() -> None:
    assert all(state.file == kind for kind, state in WEIGHT_KINDS.items())
    titles = [state.title for state in STATES if state.title]
    assert len(set(titles)) == len(titles)
