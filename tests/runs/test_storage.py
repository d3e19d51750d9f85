"""Nothing lost, nothing untrue, no one in: what lies in a run directory, and what happens to it while a run trains."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from command_line import PATIENCE, Cli, StopAt, events, lines, losses, wait_for

import fp4train.train as loop
from fp4train import checkpoint
from fp4train.checkpoint import CheckpointError
from fp4train.checkpoint.layout import checksum_of
from fp4train.checkpoint.tensors import write_parts
from fp4train.run import rescue, saving
from fp4train.shards import part_of

STEADY = ("phases=none", "schedule=constant", "schedule.warmup=0")

Before = Callable[[int, Callable[[Any], Any]], None]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    """`before(3, act)`: `act(run)` is called as step 3 begins."""
    original, acts = loop.train_step, {}

    def train_step(run: Any, recipe: Any) -> Any:
        acts.pop(run.step, lambda run: None)(run)
        return original(run, recipe)

    monkeypatch.setattr(loop, "train_step", train_step)
    return acts.__setitem__


def after_update(step: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], Any]) -> None:
    """`act(run)` is called as step `step` has updated the weights."""
    original = loop.train_step

    def train_step(run: Any, recipe: Any) -> Any:
        values = original(run, recipe)
        if run.step + 1 == step:
            act(run)
        return values

    monkeypatch.setattr(loop, "train_step", train_step)


def steps(run: str = "runs/a") -> list[int]:
    return checkpoint.steps(Path(run) / "checkpoints")


def everything(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}


# -- what is saved is good --------------------------------------------------------------------------------------------


def test_weights_that_are_finite_and_useless_do_not_replace_the_last_good_checkpoint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ruin(run: Any) -> None:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.fill_(1e38)

    after_update(3, monkeypatch, ruin)
    ended = cli("run.name=a", "checkpoint.every=1", "checkpoint.keep=1", *STEADY)
    assert ended.code == 1 and "the one of step 2 is kept" in ended.message
    assert steps() == [2, 3]
    monkeypatch.undo()
    os.chdir(cli.folder)
    shutil.rmtree("runs/a/checkpoints/step_00000003")
    assert cli("resume=runs/a").code == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_row_that_no_loss_sees_is_not_saved_and_the_run_does_not_end_well(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def spoil(run: Any) -> None:
        with torch.no_grad():
            weight = next(p for n, p in run.model.named_parameters() if "embed" in n)
            weight[200] = value  # a byte that is not in the text

    after_update(5, monkeypatch, spoil)
    ended = cli("run.name=a", "checkpoint.every=1", "checkpoint.keep=1", *STEADY)
    assert ended.code == 1 and "embed" in ended.message
    assert steps() == [4]


def test_a_moment_that_is_not_finite_is_not_saved(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(run: Any) -> None:
        next(iter(run.optimizer.state.values()))["exp_avg_sq"][0] = torch.inf

    after_update(6, monkeypatch, spoil)
    ended = cli("run.name=a", "checkpoint.every=5", *STEADY)
    assert ended.code == 1 and "exp_avg_sq" in ended.message and "step 5" in ended.message
    assert steps() == [5]


def test_a_run_of_one_step_that_ends_in_infinity_does_not_end_well(cli: Cli) -> None:
    ended = cli("run.name=a", "train.steps=1", "optim.lr=1e38", *STEADY)
    assert ended.code == 1 and "there is no checkpoint" in ended.message
    assert not Path("runs/a/checkpoints").exists() or steps() == []


@pytest.mark.parametrize("key", ["val/loss", "val/loss_recipe"])
def test_a_validation_loss_that_is_no_number_does_not_end_well(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    original = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda run, recipe: original(run, recipe) | {key: float("nan")})
    ended = cli("run.name=a", "train.steps=2", "checkpoint.every=1", *STEADY)
    assert ended.code == 1 and "validation loss" in ended.message and "step 1" in ended.message
    assert steps() == [1], "the state that gave it is not saved"


# -- what is restored fits --------------------------------------------------------------------------------------------


def reseal(path: Path, tensors: Callable[[dict[str, Any]], None], state: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint as an attacker would: with checksums that fit."""
    body = json.loads((path / "state.json").read_text())
    held = safetensors.torch.load_file(path / "tensors.safetensors")
    tensors(held)
    state(body["state"])
    (path / "tensors.safetensors").unlink()
    descriptor = os.open(path / "tensors.safetensors", os.O_WRONLY | os.O_CREAT)
    size, checksum = write_parts(descriptor, {name: part_of(tensor) for name, tensor in held.items()})
    os.close(descriptor)
    body["tensors"].update(bytes=size, sha256=checksum)
    del body["sha256"]
    (path / "state.json").write_text(json.dumps({**body, "sha256": checksum_of(body)}))


def moment(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def act(held: dict[str, Any]) -> None:
        name = next(n for n in held if n.endswith("/exp_avg"))
        held[name] = change(held[name])

    return act


def weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    def act(held: dict[str, Any]) -> None:
        name = next(n for n in held if n.startswith("model/") and held[n].dim() == 2)
        held[name] = change(held[name])

    return act


TENSORS = {
    "a moment that is shorter": (moment(lambda t: t.flatten()[:3]), "has shape [3]"),
    "a moment of integers": (moment(lambda t: t.to(torch.int8)), "has dtype torch.int8"),
    "a moment that is no number": (moment(lambda t: t.fill_(torch.nan)), "is not finite"),
    "a weight of another shape": (weight(lambda t: t[:1]), "has shape"),
    "a weight of another dtype": (weight(lambda t: t.double()), "has dtype torch.float64"),
    "a weight that is infinite": (weight(lambda t: t.fill_(torch.inf)), "is not finite"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_that_does_not_fit_is_named_and_refused(cli: Cli, change: Any, message: str) -> None:
    assert cli("run.name=a", "train.steps=2", *STEADY).code == 0
    reseal(Path("runs/a/checkpoints/step_00000002"), change, lambda state: None)
    said = cli("resume=runs/a", "train.steps=3").message
    assert "does not fit this model" in said and message in said


def setting(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def act(state: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for key in way:
            state = state[key]
        state[last] = value

    return act


STATES = {
    "no loss scale": setting("loss_scale", None),
    "a loss scale of text": setting("loss_scale", "1"),
    "a negative loss scale": setting("loss_scale", -1.0),
    "good steps of a half": setting("good_steps", 0.5),
    "weights of a list": setting("model", []),
    "a tensor that is not there": setting("model", {"a": {"$tensor": "nowhere"}}),
    "a tensor that is a list": setting("model", {"a": {"$tensor": []}}),
    "an optimizer of text": setting("optimizer", "adam"),
    "an optimizer without state": setting("optimizer", {"param_groups": []}),
    "groups that are numbers": setting("optimizer.param_groups", [1, 2]),
    "groups without parameters": setting("optimizer.param_groups", [{}, {}]),
    "a parameter too many": setting("optimizer.state", {"$items": [[99, {}]]}),
    "no moments": setting("optimizer.state", {"$items": [[0, {}]]}),
    "items of nothing": setting("optimizer.state", {"$items": [3]}),
    "scales of a layer that is not there": setting("scaling", {"nowhere": {}}),
    "scales of text": setting("scaling", "none"),
    "swaps of text": setting("swaps", "none"),
    "swaps of numbers": setting("swaps", [1]),
    "swaps of nothing": setting("swaps", [{"step": 1}]),
    "an identity of another run": setting("run", {"id": "0" * 16}),
    "data of a list": setting("data", []),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES.keys())
def test_a_crafted_state_is_refused_with_one_line(cli: Cli, change: Any) -> None:
    assert cli("run.name=a", "train.steps=1", *STEADY).code == 0
    reseal(Path("runs/a/checkpoints/step_00000001"), lambda held: None, change)
    before = Path("runs/a/metrics.jsonl").read_bytes()
    ended = cli("resume=runs/a", "train.steps=2")
    assert ended.code == 1 and "step_00000001" in ended.message
    assert Path("runs/a/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("mark", [None, [], {"bytes": "x"}, {"bytes": -1, "sha256": 3}])
def test_a_crafted_mark_of_the_metrics_costs_nothing(cli: Cli, mark: Any) -> None:
    assert cli("run.name=a", "train.steps=1", *STEADY).code == 0
    reseal(Path("runs/a/checkpoints/step_00000001"), lambda held: None, setting("metrics", mark))
    assert cli("resume=runs/a", "train.steps=2").code == 0
    assert sorted(losses("runs/a")) == [1, 2]


# -- state belongs to a run -------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_of_the_same_configuration_is_refused(cli: Cli) -> None:
    for name in ("a", "b"):
        assert cli(f"run.name={name}", "train.steps=1", *STEADY).code == 0
    shutil.rmtree("runs/a/checkpoints")
    shutil.copytree("runs/b/checkpoints", "runs/a/checkpoints")
    said = cli("resume=runs/a", "train.steps=2").message
    assert "is a checkpoint of run" in said and "another run left it there" in said


def test_runs_from_before_identities_go_on(cli: Cli, stop_at: StopAt) -> None:
    assert cli("run.name=whole", "checkpoint.every=2").code == 0
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=2").code == 137
    stop_at(-1)
    for path in Path("runs/a/checkpoints").iterdir():

        def older(state: dict[str, Any]) -> None:
            for key in ("run", "swaps", "metrics"):
                del state[key]

        reseal(path, lambda held: None, older)
    config = Path("runs/a/config.yaml")
    saved = yaml.safe_load(config.read_text())
    del saved["checkpoint"]["also"], saved["train"]["step_timeout"]
    config.write_text(yaml.safe_dump(saved))
    assert cli("resume=runs/a").code == 0
    assert losses("runs/a") == losses("runs/whole")
    assert config.read_text().startswith("# fp4train run ")


def test_no_flipped_bit_of_the_configuration_changes_a_run_in_silence(cli: Cli) -> None:
    assert cli("run.name=a", "train.steps=1", *STEADY).code == 0
    path = Path("runs/a/config.yaml")
    good = path.read_bytes()
    header = good.index(b"\n")
    for place in (*range(2, header, 13), *range(header + 1, len(good), 97)):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        ended = cli.raw("resume=runs/a", "train.steps=2")
        assert ended.code == 1, place
        told = "was changed after the run had written it" in ended.message
        assert told or (place < header and "is a checkpoint of run" in ended.message), place
    path.write_bytes(good)
    assert cli("resume=runs/a", "train.steps=2").code == 0


HOSTILE = {
    "pairs": "run: !!pairs [{name: '${oc.env:HOME}'}]",
    "pairs below": "run: {name: !!pairs [{name: '${oc.env:HOME}'}]}",
    "an interpolation for a key": "run: {'${oc.env:HOME}': 1}",
    "a bomb of aliases": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\nrun: {name: *c}",
    "a cycle": "run: &a {name: *a}",
    "a set": "run: {name: !!set {a, b}}",
    "a date": "run: {name: 2020-01-01}",
    "bytes": "run: {name: !!binary aGVsbG8=}",
    "depth": "run: " + "[" * 50_000,
    "no text": "\x00\x01",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_configuration_is_refused_with_one_line_that_tells_nothing(cli: Cli, text: str) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(text)
    said = cli.raw("resume=runs/a", "train.steps=2").message
    assert said.startswith("runs/a/config.yaml") and os.environ["HOME"] not in said


def test_a_record_of_swaps_that_is_lost_is_written_anew(cli: Cli, stop_at: StopAt) -> None:
    stop_at(2)
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 137
    stop_at(5)
    assert cli("resume=runs/a", "recipe=bf16").code == 137
    stop_at(-1)
    Path("runs/a/swaps.json").unlink()
    again = cli("resume=runs/a")
    assert again.code == 0 and "swaps.json is missing; it is written anew from the checkpoint of step 4" in again.err
    assert [v[-1] for v in losses("runs/a").values()] == ["NVFP4"] * 2 + ["BF16"] * 4


def test_a_record_of_swaps_that_was_changed_is_refused(cli: Cli, stop_at: StopAt) -> None:
    stop_at(2)
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 137
    stop_at(5)
    assert cli("resume=runs/a", "recipe=bf16").code == 137
    stop_at(-1)
    path = Path("runs/a/swaps.json")
    good = path.read_text()
    path.write_text(good.replace("precision.BF16", "precision.FP32"))
    assert "was changed after it had been recorded" in cli("resume=runs/a").message
    path.write_text("[]")
    assert "is not what the checkpoint of step 4 was trained with" in cli("resume=runs/a").message
    path.write_text(good)
    assert cli("resume=runs/a").code == 0


def left(run: str) -> list[str]:
    """The kinds of the requests that are not done with; answers may stay."""
    return [p.suffix for p in Path(run, "swap_requests").iterdir() if p.suffix != ".answer"]


def test_a_request_whose_removal_was_cut_off_is_not_carried_out_twice(
    cli: Cli, stop_at: StopAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fp4train.run.requests as requests

    stop_at(2)
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 137
    assert cli.raw("swap", "runs/a", "recipe=bf16").code == 0
    stop_at(5)
    with monkeypatch.context() as patch:
        patch.setattr(requests, "_set_aside", lambda *_: (_ for _ in ()).throw(SystemExit(137)))  # the kill
        assert cli("resume=runs/a").code == 137
    assert left("runs/a") == [".taken"]
    stop_at(-1)
    assert cli("resume=runs/a").code == 0
    assert [s["step"] for s in json.loads(Path("runs/a/swaps.json").read_text())] == [2]
    assert left("runs/a") == []


def test_metrics_that_were_cut_are_said_to_be_incomplete(cli: Cli, stop_at: StopAt) -> None:
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=4", *STEADY).code == 137
    stop_at(-1)
    path = Path("runs/a/metrics.jsonl")
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:3]))
    again = cli("resume=runs/a")
    assert again.code == 0 and "is cut off" in again.err and "2 steps of 3–4 are missing" in again.err
    assert "2 steps of 3–4 are missing" in events("runs/a", "metrics mended")[0]["found"]


def test_a_damaged_line_of_the_metrics_does_not_block_a_resume(cli: Cli, stop_at: StopAt) -> None:
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=4", *STEADY).code == 137
    stop_at(-1)
    path = Path("runs/a/metrics.jsonl")
    damaged = path.read_bytes().replace(b'{"step": 2', b'{"stXp": 2')
    path.write_bytes(damaged)
    again = cli("resume=runs/a")
    assert again.code == 0 and "was damaged and is left out" in again.err
    assert Path("runs/a/metrics.jsonl.damaged").read_bytes() == damaged
    assert sorted(losses("runs/a")) == [1, 3, 4, 5, 6]


def test_metrics_are_not_erased_where_checkpoints_are_gone(cli: Cli) -> None:
    assert cli("run.name=a", "checkpoint.every=2", *STEADY).code == 0
    before = Path("runs/a/metrics.jsonl").read_bytes()
    shutil.rmtree("runs/a/checkpoints")
    assert "its checkpoints are gone" in cli("run.name=a", "checkpoint.every=2", *STEADY).message
    Path("runs/a/heartbeat.json").unlink()
    assert "its checkpoints are gone" in cli("run.name=a", "checkpoint.every=2", *STEADY).message
    assert Path("runs/a/metrics.jsonl").read_bytes() == before
    assert cli("run.name=a", "checkpoint.every=2", "run.overwrite=true", *STEADY).code == 0


# -- no one in --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    "name",
    [".lock", "metrics.jsonl", ".metrics.jsonl.tmp", ".curves.png.tmp", "curves.png", "heartbeat.json", "plan.txt"],
)
def test_no_link_in_a_run_directory_leads_to_a_file_elsewhere(cli: Cli, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text('{"step": 0}\nprecious\n')
    Path("runs/a").mkdir(parents=True)
    Path("runs/a", name).symlink_to(victim)
    cli("run.name=a", "train.steps=1", *STEADY)
    assert victim.read_text() == '{"step": 0}\nprecious\n'


def test_checkpoints_over_a_link_are_neither_read_nor_pruned_nor_overwritten(cli: Cli) -> None:
    for name in ("a", "b"):
        assert cli(f"run.name={name}", "train.steps=2", "checkpoint.every=1", *STEADY).code == 0
    before = everything(Path("runs/b"))
    shutil.rmtree("runs/a/checkpoints")
    Path("runs/a/checkpoints").symlink_to(Path("runs/b/checkpoints").resolve())
    for command in (
        ["resume=runs/a", "train.steps=3"],
        ["run.name=a", "train.steps=2", "checkpoint.every=1", "run.overwrite=true", *STEADY],
    ):
        ended = cli(*command)
        assert ended.code == 1 and "link" in ended.message
    assert everything(Path("runs/b")) == before
    assert Path("runs/a/metrics.jsonl").exists(), "nothing was removed before the refusal"


def test_overwriting_spares_a_folder_whose_configuration_is_not_ours(cli: Cli) -> None:
    Path("mine/checkpoints").mkdir(parents=True)
    Path("mine/checkpoints/precious").write_text("years of work")
    Path("mine/config.yaml").write_text("run: {name: mine}\nserver: {port: 80}\n")
    said = cli("run.name=a", "run.dir=mine", "run.overwrite=true", "train.steps=1").message
    assert "is not the configuration of a run of fp4train" in said
    assert Path("mine/checkpoints/precious").exists()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "swaps.json", "config.yaml"])
def test_a_pipe_in_a_run_directory_stops_nobody(cli: Cli, name: str) -> None:
    assert cli("run.name=a", "train.steps=1", *STEADY).code == 0
    Path("runs/a", name).unlink(missing_ok=True)
    os.mkfifo(Path("runs/a", name))
    began = time.monotonic()
    ended = cli("resume=runs/a", "train.steps=2")
    assert ended.code == 1 and time.monotonic() - began < 60
    assert "pipe" in ended.message or "is not a run directory" in ended.message


def test_requests_that_are_pipes_links_or_huge_are_refused_and_the_run_goes_on(cli: Cli, before: Before) -> None:
    def ask(run: Any) -> None:
        folder = Path("runs/a/swap_requests")
        folder.mkdir()
        os.mkfifo(folder / "1.json")
        (folder / "2.json").symlink_to("/etc/passwd")
        with (folder / "3.json").open("wb") as file:
            file.truncate(4 << 30)
        (folder / "4.json").write_text(json.dumps({"recipe": {}, "name": "x", "at": 3, "sha256": "0"}))

    before(1, ask)
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 0
    said = [e["reason"] for e in events("runs/a", "swap refused")]
    assert len(said) == 4
    for reason, word in zip(said, ("pipe", "link", "not read", "damaged"), strict=True):
        assert word in reason
    assert left("runs/a") == []


# -- every ending saves -----------------------------------------------------------------------------------------------

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_signals_of_schedulers_end_a_run_saved(cli: Cli, before: Before, number: signal.Signals) -> None:
    def twice(run: Any) -> None:
        os.kill(os.getpid(), number)
        if number != signal.SIGQUIT:
            os.kill(os.getpid(), number)  # the system repeats SIGXCPU every second

    before(2, twice)
    ended = cli("run.name=a", "train.steps=6", *STEADY)
    assert ended.code == 128 + number and f"stopped by {number.name}, resume=runs/a goes on" in ended.out
    assert steps() == [3]


def test_a_signal_whose_save_fails_promises_nothing(cli: Cli, before: Before, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*rest: Any, **options: Any) -> Path:
        raise CheckpointError("No space left on device.")

    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(rescue, "PAUSES", ())
    before(2, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    ended = cli("run.name=a", *STEADY)
    assert ended.code == 128 + signal.SIGTERM
    assert "its end is not saved" in ended.out and "goes on" not in ended.out


def test_any_exception_saves_what_was_before_it(cli: Cli, before: Before) -> None:
    def fail(run: Any) -> None:
        raise RuntimeError("of somebody's plugin")

    before(3, fail)
    assert cli.raw(*cli.tiny("run.name=a", "checkpoint.every=0", *STEADY)).code == 1
    assert steps() == [3]
    assert "of somebody's plugin" in events("runs/a", "error")[0]["message"]
    assert cli("resume=runs/a").code == 0
    assert cli("run.name=whole", *STEADY).code == 0
    assert losses("runs/a") == losses("runs/whole")


def test_an_exception_amid_an_update_saves_no_torn_weights(cli: Cli, before: Before) -> None:
    def tear(run: Any) -> None:
        def step(*_: Any) -> None:
            raise RuntimeError("half-way")

        run.optimizer.step = step

    before(3, tear)
    ended = cli.raw(*cli.tiny("run.name=a", "checkpoint.every=2", *STEADY))
    assert ended.code == 1 and "interrupted while the weights were updated" in ended.err
    assert steps() == [2]


@pytest.mark.long
def test_a_damaged_record_of_swaps_refuses_a_swap_and_not_the_run(cli: Cli, before: Before) -> None:
    def ask(run: Any) -> None:
        cli.raw("swap", "runs/a", "recipe=bf16")
        Path("runs/a/swaps.json").write_text("{{{")

    before(1, ask)
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 0 and "swaps.json cannot be read" in events("runs/a", "swap refused")[0]["reason"]


@pytest.mark.parametrize("at", [2, 3], ids=["while it trains", "at its end"])
def test_a_directory_that_is_moved_is_noticed_and_gets_the_checkpoint(cli: Cli, before: Before, at: int) -> None:
    def move(run: Any) -> None:
        os.rename("runs/a", "runs/moved")

    before(at, move)
    ended = cli("run.name=a", "train.steps=4", "checkpoint.every=0", *STEADY)
    assert ended.code == 1 and "runs/a was moved to" in ended.message
    assert steps("runs/moved") and not Path("runs/a/checkpoints").exists()


def test_a_directory_that_is_removed_is_noticed(cli: Cli, before: Before) -> None:
    before(2, lambda run: shutil.rmtree("runs/a"))
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 1 and "runs/a was removed while the run trained in it" in ended.message


def test_a_lock_that_is_removed_is_noticed(cli: Cli, before: Before) -> None:
    before(2, lambda run: Path("runs/a/.lock").unlink())
    ended = cli("run.name=a", "train.steps=4", *STEADY)
    assert ended.code == 1 and "runs/a/.lock was removed" in ended.message
    assert steps() == [4], "nobody else trains there: it is saved"


def test_a_second_place_has_a_run_that_can_be_resumed(cli: Cli, stop_at: StopAt) -> None:
    assert cli("run.name=whole", "checkpoint.every=2").code == 0
    stop_at(5)
    assert cli("run.name=a", "checkpoint.every=2", "checkpoint.also=second").code == 137
    stop_at(-1)
    assert steps("second/a") == [2, 4]
    shutil.rmtree("runs/a")
    assert cli("resume=second/a", "run.name=a").code == 0
    assert losses("runs/a") == losses("runs/whole")
    assert cli("run.name=b", "run.dir=runs/b", "train.steps=1", "checkpoint.also=second").code == 0
    Path("second/b").rename("second/c")
    ended = cli("run.name=c", "train.steps=1", "checkpoint.also=second")
    assert ended.code == 0 and "second/c holds another run" in ended.err


def test_a_full_disk_is_survived_by_the_second_place(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint.save

    def save(folder: Any, *rest: Any, **options: Any) -> Path:
        if "second" not in str(folder.path):
            raise CheckpointError("No space left on device.")
        return original(folder, *rest, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    ended = cli("run.name=a", "train.steps=2", "checkpoint.also=second", *STEADY)
    assert ended.code == 0 and "No space left on device. It is in second/a" in ended.err
    assert steps("second/a") == [2]


# -- nothing stalls a step --------------------------------------------------------------------------------------------


def test_steps_go_on_while_a_checkpoint_is_written_and_two_never_overlap(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, log = checkpoint.save, []

    def slow(folder: Any, step: int, *rest: Any, **options: Any) -> Path:
        log.append(("begin", step))
        time.sleep(0.5)
        log.append(("end", step))
        return original(folder, step, *rest, **options)

    trained = loop.train_step

    def train_step(run: Any, recipe: Any) -> Any:
        log.append(("step", run.step))
        return trained(run, recipe)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(loop, "train_step", train_step)
    assert cli("run.name=a", "checkpoint.every=2", "checkpoint.keep=3", *STEADY).code == 0
    assert log.index(("step", 2)) < log.index(("end", 2)), "step 2 ran while its checkpoint was written"
    assert log.index(("end", 2)) < log.index(("begin", 4)) < log.index(("end", 4)) < log.index(("begin", 6))
    monkeypatch.undo()
    os.chdir(cli.folder)
    for step in steps():
        state = checkpoint.load(Path("runs/a/checkpoints"), step).tensors
        assert cli(f"run.name=to{step}", f"train.steps={step}", *STEADY).code == 0
        whole = checkpoint.load(Path(f"runs/to{step}/checkpoints"), step).tensors
        assert all(torch.equal(state[name], whole[name]) for name in whole), "the state of its own step"


def test_a_disk_that_does_not_answer_is_left_behind(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoint.save

    def stuck(folder: Any, step: int, *rest: Any, **options: Any) -> Path:
        if step == 2:
            time.sleep(2)
        return original(folder, step, *rest, **options)

    monkeypatch.setattr(checkpoint, "save", stuck)
    monkeypatch.setattr(saving, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(rescue, "PAUSES", ())
    ended = cli("run.name=a", "checkpoint.every=2", *STEADY)
    assert ended.code == 1 and "a slow disk?" in ended.err and "not saved" in ended.out
    assert sorted(losses("runs/a")) == list(range(1, 7))


def test_a_heartbeat_says_how_far_a_run_is(cli: Cli) -> None:
    began = time.time()
    assert cli("run.name=a", "train.steps=3", *STEADY).code == 0
    beat = json.loads(Path("runs/a/heartbeat.json").read_text())
    assert (beat["step"], beat["of"], beat["saved"], beat["running"]) == (3, 3, 3, False)
    assert began <= beat["time"] <= time.time() and beat["loss"] == losses("runs/a")[3][0]
    assert beat["run"] in Path("runs/a/config.yaml").read_text().splitlines()[0]


HANGS = """
import sys, time
import fp4train.train as loop
from fp4train.cli import main
original = loop.train_step
def train_step(run, recipe):
    if run.step == 2:
        time.sleep(1000)
    return original(run, recipe)
loop.train_step = train_step
main(sys.argv[1:])
"""


def test_a_step_that_hangs_ends_the_run_with_its_stacks(cli: Cli) -> None:
    import subprocess
    import sys

    arguments = cli.tiny("run.name=a", "train.step_timeout=5", "checkpoint.every=1", *STEADY)
    ended = subprocess.run(
        [sys.executable, "-c", HANGS, *arguments], cwd=cli.folder, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == 1 and "Timeout (0:00:05)!" in ended.stderr and "train_step" in ended.stderr
    assert cli("resume=runs/a", "train.step_timeout=0").code == 0


def test_a_terminal_that_is_closed_ends_a_run_saved_with_its_code(cli: Cli) -> None:
    pid, terminal = os.forkpty()
    if pid == 0:
        import sys

        os.chdir(cli.folder)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = [sys.executable, "-m", "fp4train", *cli.tiny("run.name=a", "train.steps=100000", *STEADY)]
        os.execve(sys.executable, command, {**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for(lambda: Path("runs/a/metrics.jsonl").exists() and len(lines("runs/a")) > 3)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert steps() == [max(losses("runs/a"))]
