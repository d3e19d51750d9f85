"""The command line as tests call it, and what its runs leave behind."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml

import fp4train.train as loop
from fp4train import checkpoint
from fp4train.checkpoint import write_parts
from fp4train.cli import main
from fp4train.config.command_line import CommandLine, option_names
from fp4train.run.record.journal import read_journal, swaps
from fp4train.sealed import checksum as checksum_of
from fp4train.shards import shard_of

StopAt = Callable[[int], None]
Before = Callable[[int, Callable[[Any], Any]], None]

PATIENCE = 180.0
"""Seconds after which a process hangs; it starts, and draws its curves, in a tenth of them even on
a machine in use.
"""

UNAUDITED = ("audit.every=0", "audit.sums=0")
"""A tiny run's audits, and the trial of its plan before the first step, take as long as its
training.
"""
TINY = (
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=64",
    "train.steps=6",
    "train.batch_size=4",
    "train.seq_len=32",
    "eval.batches=1",
    "data=text",
    "track=jsonl",
    *UNAUDITED,
)
"""A run of tests. One whose words name a key of `audit` has the other defaults of audits:
`audit.every=null` asks for what a user's run does.
"""
STEADY = ("phases=none", "schedule=constant", "schedule.warmup=0")


def reading(text: Path) -> tuple[str, str]:
    """The words of a run that reads `text`: where it lies, and where its token ids are kept."""
    return f"data.path={text}", f"data.cache_dir={text.parent / 'cache'}"


def tiny(text: Path, *arguments: str) -> list[str]:
    """The arguments of a tiny run, which reads `text` unless other data is named; later ones
    win.
    """
    verb = [arguments[0]] if arguments and arguments[0] in ("train", "plan") else []
    rest = arguments[len(verb) :]
    given = {word.partition("=")[0] for word in rest}
    if "resume" in given:
        return list(arguments)
    base = TINY if "data" in given else (*TINY, *reading(text))
    return [*verb, *besides(base, given), *rest]


def options_of(verb: str) -> list[str]:
    """The names of a verb's own options: the fields of its class, as `PlanOptions` of plan."""
    module = import_module(f"fp4train.cli.{verb}")
    return option_names(getattr(module, f"{verb.capitalize()}Options", CommandLine))


def named(words: Iterable[str]) -> str:
    """What `run.name=…` among the words says, or a."""
    names = (word.removeprefix("run.name=") for word in words if word.startswith("run.name="))
    return next(names, "a")


def besides(base: Iterable[str], given: Collection[str]) -> list[str]:
    """The arguments of `base` whose keys are not given; sizes of a model only of the model that
    they belong to, and no silence of audits beside a key of theirs.
    """
    left_out: tuple[str, ...] = ()
    if "model" in given:
        left_out += ("model.",)
    if any(key.startswith("audit.") for key in given):
        left_out += ("audit.",)
    return [
        word
        for word in base
        if word.partition("=")[0] not in given and not word.startswith(left_out)
    ]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The one message of a command that failed."""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("fp4train: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("fp4train: ")


@dataclass(frozen=True)
class Cli:
    """The command line, in this process (`cli(…)`) or in one of its own (`cli.start(…)`)."""

    text: Path
    folder: Path
    capture: pytest.CaptureFixture[str]
    finished: Callable[..., Path]
    """See `FinishedRuns`."""

    @property
    def paths(self) -> tuple[str, str]:
        """What a tiny run names outside of itself, to be named again where a test has rewritten its
        configuration.
        """
        return reading(self.text)

    def tiny(self, *arguments: str) -> list[str]:
        """See `tiny`."""
        return tiny(self.text, *arguments)

    def raw(self, *arguments: str) -> Outcome:
        """Run a command as it is."""
        self.capture.readouterr()
        code: object = None
        with warnings.catch_warnings():
            try:
                main(list(arguments))
            except SystemExit as ended:
                code = ended.code
        shown = self.capture.readouterr()
        assert isinstance(code, int)
        return Outcome(code, shown.out, shown.err)

    def __call__(self, *arguments: str) -> Outcome:
        """Run a tiny run to its end."""
        return self.raw(*self.tiny(*arguments))

    def trained(self, *arguments: str) -> Path:
        """A copy of a finished run, in the working directory: for tests of what comes after it.
        One that has patched something trains a run of its own.
        """
        run = Path("runs", named(arguments))
        shutil.copytree(self.finished(*arguments), run)
        return run

    def start(self, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
        """A tiny run in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "fp4train", *self.tiny(*arguments)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **options,
        )


def lines(run: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's metrics, of a running one's those that are whole."""
    *whole, _ = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in whole]


def losses(run: Path | str) -> dict[int, tuple[Any, ...]]:
    """What must be equal to the bit in two runs that do the same, by step."""
    names = (
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/loss_scale",
        "train/tokens",
        "val/loss",
        "val/loss_recipe",
    )
    keys = (*names, "precision/recipe")
    return {
        line["step"]: tuple(line.get(k) for k in keys)
        for line in lines(run)
        if "train/loss" in line
    }


def events(run: Path | str, name: str) -> list[dict[str, Any]]:
    """The events of one name in a run's metrics."""
    return [line for line in lines(run) if line.get("event") == name]


def evaluations(run: Path | str) -> list[dict[str, Any]]:
    """The results of evaluations that a run keeps: step, task, recipe and values, without what
    chains the lines.
    """
    kept = ("event", "after", "crc")
    return [{k: v for k, v in line.items() if k not in kept} for line in events(run, "evaluation")]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def around_steps(
    monkeypatch: pytest.MonkeyPatch, around: Callable[[Any, Callable[[], Any]], Any]
) -> None:
    """`around(run, step)` is called in the place of each step of the runs to come; `step()` takes
    it, and gives what `around` returns.
    """
    original = loop.train_step

    def train_step(run: Any, recipe: Any) -> Any:
        return around(run, lambda: original(run, recipe))

    monkeypatch.setattr(loop, "train_step", train_step)


def before_steps(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], Any]) -> None:
    """`act(run)` is called as each step of the runs to come begins."""

    def around(run: Any, step: Callable[[], Any]) -> Any:
        act(run)
        return step()

    around_steps(monkeypatch, around)


def after_update(step: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], Any]) -> None:
    """`act(run)` is called as step `step` has updated the weights."""

    def around(run: Any, take: Callable[[], Any]) -> Any:
        values = take()
        if run.step + 1 == step:
            act(run)
        return values

    around_steps(monkeypatch, around)


def steps(run: Path | str = "runs/a") -> list[int]:
    """The steps that have a checkpoint."""
    return checkpoint.steps(Path(run) / "checkpoints")


def marked(run: Path | str) -> dict[int, str]:
    """The doubts about the checkpoints of a run, by step."""
    folders = Path(run, "checkpoints").glob("step_*")
    bodies = [json.loads((folder / "state.json").read_text()) for folder in folders]
    return {body["step"]: body["state"]["doubt"] for body in bodies if "doubt" in body["state"]}


def everything(folder: Path) -> dict[Path, bytes]:
    """The files in a folder, and what they hold."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}


def reseal(
    path: Path, tensors: Callable[[dict[str, Any]], None], state: Callable[[dict[str, Any]], None]
) -> None:
    """Change a checkpoint as an attacker would: with checksums that fit."""
    body = json.loads((path / "state.json").read_text())
    files = {file: safetensors.torch.load_file(path / file) for file in body["tensors"]["files"]}
    held = {name: tensor for each in files.values() for name, tensor in each.items()}
    tensors(held)
    state(body["state"])
    described = {
        file: _written(path / file, {name: held[name] for name in each})
        for file, each in files.items()
    }
    _write_state(path, body, {"files": described, "aliases": body["tensors"]["aliases"]})


def in_one_file(path: Path, version: int) -> None:
    """Give a checkpoint weights and moments in one file, as older versions did: `version` 1 on one
    rank, 2 on more.
    """
    body = json.loads((path / "state.json").read_text())
    held: dict[str, Any] = {}
    for file in body["tensors"]["files"]:
        held |= safetensors.torch.load_file(path / file)
        (path / file).unlink()
    described = _written(path / "tensors.safetensors", held)
    if version == 2:
        described = {"files": {"tensors.safetensors": described}}
    _write_state(
        path, {**body, "version": version}, {**described, "aliases": body["tensors"]["aliases"]}
    )


def _written(path: Path, held: dict[str, Any]) -> dict[str, Any]:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    size, checksum = write_parts(
        descriptor, {name: shard_of(tensor) for name, tensor in held.items()}
    )
    os.close(descriptor)
    return {"bytes": size, "sha256": checksum}


def _write_state(path: Path, body: dict[str, Any], tensors: dict[str, Any]) -> None:
    del body["sha256"]
    body["tensors"] = tensors
    (path / "state.json").write_text(json.dumps({**body, "sha256": checksum_of(body)}))


def reseal_config(run: Path | str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a run's configuration as an attacker would: with the run's identity and a checksum
    that fits.
    """
    path = Path(run, "config.yaml")
    head, _, body = path.read_text().partition("\n")
    values = yaml.safe_load(body)
    change(values)
    body = yaml.safe_dump(values)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f"{' '.join(head.split()[:4])} sha256 {checksum}\n{body}")


def recorded(run: Path | str) -> list[tuple[int, str]]:
    """Step and name of the swaps that a run's journal has."""
    return [(swap["step"], swap["name"]) for swap in swaps(read_journal(Path(run)))]


def left(run: str) -> list[str]:
    """The kinds of the requests that are not done with; answers may stay."""
    return [p.suffix for p in Path(run, "swap_requests").iterdir() if p.suffix != ".answer"]
