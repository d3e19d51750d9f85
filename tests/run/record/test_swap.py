"""`fp4train swap`: the recipe of a running run changes, or the request is refused; the run goes on
either way.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Cli, StopAt, events, losses, recorded

import fp4train.run.supervise.agreement as agreement
from fp4train.errors import LAST_WITH_OLDER_RECIPES
from fp4train.precision import MXFP8
from fp4train.sealed import sealed

STEADY = ("phases=none", "schedule=constant")


@pytest.fixture
def before_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Any]], None]:
    """`before_step(3, act)`: `act` is called while the loop stands before step 3, from "another
    terminal".
    """
    original = agreement.pick_up_swaps
    acts = {}

    def pick_up_swaps(run: Any) -> None:
        acts.pop(run.step, lambda: None)()
        original(run)

    monkeypatch.setattr(agreement, "pick_up_swaps", pick_up_swaps)
    return acts.__setitem__


def own_recipe() -> None:
    """A user's own folder of configurations, mine, with a recipe house in it."""
    Path("mine/recipe").mkdir(parents=True)
    Path("mine/recipe/house.yaml").write_text("defaults: [mxfp8, _self_]\nelement: hybrid\n")


def test_a_swap_takes_effect_at_once_or_at_its_step_and_survives_a_resume(
    cli: Cli, stop_at: StopAt, before_step: Callable[[int, Callable[[], Any]], None]
) -> None:
    before_step(1, lambda: cli.raw("swap", "runs/a", "recipe=mxfp8", "wait=0"))
    before_step(2, lambda: cli.raw("swap", "runs/a", "recipe=bf16", "at=4", "wait=0"))
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=3", *STEADY).code == 137
    stop_at(-1)
    names = [values[-1] for values in losses("runs/a").values()]
    assert names == ["NVFP4", "MXFP8", "MXFP8", "MXFP8"], "the fifth, in BF16, was not read yet"
    assert recorded("runs/a") == [(1, "mxfp8"), (4, "bf16")]
    assert [(e["recipe"], e["at"]) for e in events("runs/a", "swap")] == [("mxfp8", 1), ("bf16", 4)]
    before = losses("runs/a")
    assert cli("resume=runs/a").code == 0
    assert {s: v for s, v in losses("runs/a").items() if s <= 4} == before
    assert [values[-1] for values in losses("runs/a").values()] == [*names, "BF16", "BF16"]
    assert "swap at step 4" in Path("runs/a/plan.txt").read_text()


def test_a_later_request_for_the_same_step_replaces_the_earlier(
    cli: Cli, before_step: Callable[[int, Callable[[], Any]], None]
) -> None:
    def ask() -> None:
        cli.raw("swap", "runs/a", "recipe=mxfp8", "at=2", "wait=0")
        cli.raw("swap", "runs/a", "recipe=mxfp8", "recipe.element=hybrid", "at=2", "wait=0")

    before_step(1, ask)
    assert cli("run.name=a", "train.steps=3", *STEADY).code == 0
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4", "NVFP4", "MXFP8(element=hybrid)"]


def test_a_resume_names_its_swap_with_the_keys_of_the_recipe(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    words = (
        "recipe=nvfp4",
        "recipe.high_precision=[dgrad]",
        "recipe.outliers=null",
        "~recipe.guard",
    )
    assert cli("resume=runs/a", "train.steps=3", *words).code == 0
    name = "nvfp4 (high_precision=[dgrad], outliers=null, ~guard)"
    assert f"2     {name}  took effect" in cli.raw("swap", "runs/a").out


BF16 = {"_target_": "fp4train.precision.BF16"}
NOW = {"name": "x", "at": None}
REQUESTS = {
    "past": ({"recipe": BF16, "name": "bf16", "at": 0}, "step 0 is past"),
    "beyond the end": ({"recipe": BF16, "name": "bf16", "at": 9}, "beyond the end"),
    "no step": ({"recipe": BF16, "name": "bf16", "at": "x"}, "must be a whole"),
    "foreign code": (
        {"recipe": {"_target_": "os.system", "command": "touch hit"}, **NOW},
        "os.system",
    ),
    "no such option": (
        {"recipe": {"_target_": "fp4train.precision.NVFP4", "hadamar": 1}, **NOW},
        "hada",
    ),
    "another dtype": (
        {"recipe": {"_target_": "fp4train.precision.FP16"}, "name": "fp16", "at": None},
        "float16",
    ),
    "garbage": ("{{{", "cannot be read"),
    "a folder": (None, "cannot be read"),
}


def test_impossible_requests_are_refused_without_hurting_the_run(
    cli: Cli, before_step: Callable[[int, Callable[[], Any]], None]
) -> None:
    def ask() -> None:
        folder = Path("runs/a/swap_requests")
        folder.mkdir()
        for i, (body, _) in enumerate(REQUESTS.values()):
            path = folder / f"{i:02}.json"
            if body is None:
                path.mkdir()
            elif isinstance(body, dict):
                path.write_bytes(sealed(body))
            else:
                path.write_bytes(body if isinstance(body, bytes) else body.encode())

    assert cli("run.name=quiet", "train.steps=4", *STEADY).code == 0
    before_step(1, ask)
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 0 and losses("runs/a") == losses("runs/quiet")
    refused = [e["reason"] for e in events("runs/a", "swap refused")]
    assert len(refused) == len(REQUESTS), "each once"
    for (name, (_, reason)), said in zip(REQUESTS.items(), refused, strict=True):
        assert reason in said, name
        assert said.splitlines()[0] in ended.err
    assert not Path("hit").exists() and recorded("runs/a") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/a", "recipe=nvfp5"], "did you mean 'nvfp4'?"),
        (["runs/a", "at=1"], "swap needs recipe=NAME"),
        (["runs/a", "cancel=7"], "cancel=7: runs/a has no such pending swap; none is pending"),
        (["runs/a", "cancel=7", "recipe=bf16"], "stands alone, not with recipe=bf16"),
        (["recipe=bf16"], "swap needs one run directory"),
        (
            ["runs/b", "recipe=bf16"],
            "runs/b is not a run directory (it has no config.yaml); runs holds a",
        ),
        (["runs/a", "recipe=bf16", "at=-1"], "at=-1 must be a whole number from 0"),
        (["runs/a", "recipe=bf16", "at=2"], "beyond the end: runs/a has 2 steps"),
        (["runs/a", "recipe=bf16", "policy.last=0"], "unknown key 'policy.last' (known: at, wait"),
        (["runs/a", "recipe=mxfp8", "recipe.element=e9m9"], "e9m9"),
        (["runs/a", "recipe=house"], "there is no such recipe"),
        (
            ["runs/a", "recipe=house", "--config-dir=nowhere"],
            "--config-dir nowhere: there is no such folder",
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_the_terminal(
    cli: Cli, arguments: list[str], message: str
) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text("run: {name: a}\ntrain: {steps: 2}\n")
    own_recipe()
    ended = cli.raw("swap", *arguments)
    assert ended.code == 1 and message in ended.message
    assert not Path("runs/a/swap_requests").exists()


def test_a_request_to_a_run_that_stands_waits_for_its_resume(cli: Cli, stop_at: StopAt) -> None:
    stop_at(3)
    assert cli("run.name=a", "checkpoint.every=2", "train.steps=5", *STEADY).code == 137
    stop_at(-1)
    asked = cli.raw("swap", "runs/a", "recipe=bf16", "at=4")
    assert asked.code == 0 and "picked up on resume=runs/a" in asked.out
    assert cli("resume=runs/a").code == 0
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4"] * 4 + ["BF16"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--config-dir", "mine", "recipe=house"), marks=pytest.mark.long),
        ("recipe=mine/recipe/house.yaml",),
    ],
    ids=["folder", "file"],
)
def test_a_swap_takes_a_recipe_of_the_users_own(
    cli: Cli, stop_at: StopAt, words: tuple[str, ...]
) -> None:
    own_recipe()
    stop_at(2)
    assert cli("run.name=a", "checkpoint.every=2", "train.steps=4", *STEADY).code == 137
    stop_at(-1)
    assert cli.raw("swap", "runs/a", *words, "at=3").code == 0
    assert cli("resume=runs/a").code == 0
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4"] * 3 + ["MXFP8(element=hybrid)"]


@pytest.mark.long
def test_a_point_of_a_sweep_is_swapped_and_resumed_by_its_name(cli: Cli) -> None:
    """Such a name holds "=", as overrides do."""
    assert cli("-m", "optim.lr=0.001,0.002", "train.steps=2", *STEADY).code == 0
    run = "runs/llama_tiny-nvfp4-lr=0.002"
    asked = cli.raw("swap", run, "recipe=bf16")
    assert asked.code == 0 and f"picked up on resume={run} train.steps=…" in asked.out
    assert (
        cli.raw("swap", run, "recipe=bf16", "at=1").message
        == f"at=1 is past: {run} has done 2 steps"
    )
    assert cli(f"resume={run}", "train.steps=3").code == 0
    assert [v[-1] for v in losses(run).values()] == ["NVFP4", "NVFP4", "BF16"]


def test_a_swap_that_the_resumed_run_would_refuse_is_refused_at_once(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1")
    assert "a float16 run has a loss scale" in cli.raw("swap", "runs/a", "recipe=fp16").message
    assert not Path("runs/a/swap_requests").exists()


def test_pending_requests_are_listed_and_cancelled(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    assert cli.raw("swap", "runs/a").out == "runs/a: no swap is recorded, none is pending\n"
    for recipe in ("bf16", "mxfp8"):
        assert cli.raw("swap", "runs/a", f"recipe={recipe}").code == 0
    listed = cli.raw("swap", "runs/a").out.splitlines()
    assert listed[0].split() == ["step", "recipe", "state", "taken", "back", "by"]
    assert [line.split()[:3] for line in listed[2:]] == [
        ["next", "bf16", "pending"],
        ["next", "mxfp8", "pending"],
    ]
    request = listed[3].partition("cancel=")[2]
    assert f"request {request} is cancelled" in cli.raw("swap", "runs/a", f"cancel={request}").out
    assert "1 pending request is cancelled" in cli.raw("swap", "runs/a", "cancel=all").out
    assert cli("resume=runs/a", "train.steps=3").code == 0
    assert {v[-1] for v in losses("runs/a").values()} == {"NVFP4"}


def test_a_recorded_swap_is_cancelled_by_the_run_that_resumes(cli: Cli, stop_at: StopAt) -> None:
    stop_at(2)
    assert cli("run.name=a", "checkpoint.every=1", "train.steps=4", *STEADY).code == 137
    assert cli.raw("swap", "runs/a", "recipe=bf16", "at=3").code == 0
    assert cli("resume=runs/a").code == 137, "takes the request, and stops at once"
    stop_at(-1)
    assert recorded("runs/a") == [(3, "bf16")]
    assert "cancelled when the run is resumed" in cli.raw("swap", "runs/a", "cancel=3").out
    assert cli("resume=runs/a").code == 0
    assert recorded("runs/a") == [] and {v[-1] for v in losses("runs/a").values()} == {"NVFP4"}


def test_nobody_waits_longer_than_asked(
    cli: Cli, before_step: Callable[[int, Callable[[], Any]], None]
) -> None:
    """The loop stands while the command waits, so no answer can come."""
    asked: list[Any] = []
    before_step(1, lambda: asked.append(cli.raw("swap", "runs/a", "recipe=bf16", "wait=0.2")))
    assert cli("run.name=a", "train.steps=3", *STEADY).code == 0
    assert asked[0].code == 2 and "no answer in 0.2 s" in asked[0].out
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4", "BF16", "BF16"]


def test_a_request_that_a_killed_process_had_taken_is_taken_again(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=1", *STEADY)
    assert cli.raw("swap", "runs/a", "recipe=bf16").code == 0
    (request,) = Path("runs/a/swap_requests").iterdir()
    request.rename(request.with_suffix(".taken"))
    assert cli("resume=runs/a", "train.steps=2").code == 0
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4", "BF16"]


def test_a_run_that_has_lost_its_history_does_not_say_that_nothing_was_swapped(cli: Cli) -> None:
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    Path("runs/a/history.jsonl").unlink()
    shown = cli.raw("swap", "runs/a")
    assert shown.code == 0 and "no swap is recorded" not in shown.out
    assert shown.out.startswith(
        "runs/a/history.jsonl is missing or empty: which swaps took effect in 2 steps is not"
    )


@pytest.mark.long
def test_recorded_recipes_that_are_refused_are_told_with_the_commit_that_takes_them(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.trained("run.name=a", "train.steps=2", "recipe=mxfp8", *STEADY)
    cli.trained("run.name=b", "train.steps=2", "recipe=bf16", *STEADY)
    assert cli("resume=runs/b", "train.steps=3", "recipe=mxfp8").code == 0

    def refuse(recipe: Any) -> None:
        raise ValueError("two kinds of history")

    monkeypatch.setattr(MXFP8, "__post_init__", refuse)
    last = f"Go on with the commit {LAST_WITH_OLDER_RECIPES}, the last that reads it"
    said = cli("resume=runs/b", "train.steps=4").message
    assert said.startswith(
        "runs/b/history.jsonl is of an older fp4train: it has a swap to mxfp8 at"
    )
    assert "two kinds of history" in said and last in said
    said = cli("resume=runs/a", "train.steps=3").message
    assert said.startswith(
        "runs/a/config.yaml is of an older fp4train: it has recipe with a refused"
    )
    assert "two kinds of history" in said and last in said
    assert cli("init=runs/b", "run.name=c", "recipe=bf16", "train.steps=1").code == 0
    path = Path("runs/a/config.yaml")
    values = yaml.safe_load(path.read_text())
    values["recipe"] = {"_target_": "fp4train.precision.BF16"}
    values["phases"] = {
        "late": {
            "_target_": "fp4train.precision.Phase",
            "start": 2,
            "recipe": {"_target_": "fp4train.precision.MXFP8"},
        }
    }
    path.write_text(yaml.safe_dump(values))
    said = cli("resume=runs/a", "train.steps=3", *cli.paths).message
    assert "it has phases with a refused recipe (phases.late.recipe" in said
    assert "give phases=none or policy=NAME with resume=RUN" in said
    assert cli("resume=runs/a", "train.steps=3", "phases=none", *cli.paths).code == 0
