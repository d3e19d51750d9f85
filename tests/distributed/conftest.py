"""Runs of several ranks: gloo on this machine, one thread each; see `rank_server`."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import UNAUDITED, besides, reading

from fp4train import checkpoint

PATIENCE = 240.0
TINY = (
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=64",
    "train.steps=4",
    "train.batch_size=4",
    "train.seq_len=32",
    "eval.batches=1",
    "eval.every=2",
    "data=text",
    "track=jsonl",
    "optim.clip=0.5",
    "checkpoint.every=0",
    *UNAUDITED,
)


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended."""

    codes: list[int]
    out: list[str]
    err: list[str]
    seconds: float

    @property
    def message(self) -> str:
        """The one message of a job that failed, which rank 0 alone gives."""
        told = [
            [line for line in text.splitlines() if line.startswith("fp4train: ")]
            for text in self.err
        ]
        assert all("Traceback" not in text for text in self.err), self.err
        assert len(told[0]) == 1 and not any(told[1:]), told
        assert all(self.codes), self.codes
        return told[0][0].removeprefix("fp4train: ")


@dataclass(frozen=True)
class Server:
    """A process that starts ranks, see `rank_server`."""

    process: "subprocess.Popen[str]"
    folder: Path
    """For the runs of its ranks that tests compare with (`Ranks.reference`)."""

    def ask(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


class Job:
    """Ranks that run."""

    def __init__(self, ranks: "Ranks", processes: list[int]) -> None:
        self.ranks, self.processes, self.began = ranks, processes, time.monotonic()

    def wait(self) -> Ended:
        alarm = threading.Timer(PATIENCE, self.kill)
        alarm.start()
        codes = self.ranks.server.answer()
        alarm.cancel()
        texts = [
            [(self.ranks.folder / f"rank{n}.{kind}").read_text() for n in range(len(codes))]
            for kind in ("out", "err")
        ]
        return Ended(codes, texts[0], texts[1], time.monotonic() - self.began)

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process, signal.SIGKILL)


class Ranks:
    """`ranks(2, "key=value", …)` trains a tiny run on two ranks to its end; `ranks.start(…)` does
    not wait.
    """

    def __init__(self, server: Server, text: Path, folder: Path) -> None:
        self.server = server
        self.text = text
        self.folder = folder

    def tiny(self, *arguments: str) -> list[str]:
        given = {each.partition("=")[0] for each in arguments}
        base = () if "resume" in given else (*TINY, *reading(self.text))
        return [*besides(base, given), *arguments]

    def ask(self, count: int, **job: Any) -> Job:
        wanted = {"arguments": [], "environment": {}, "patch": "", "program": "", **job}
        self.server.ask({"ranks": count, "folder": str(self.folder), **wanted})
        return Job(self, self.server.answer())

    def start(self, count: int, *arguments: str, patch: str = "", **environment: str) -> Job:
        """`{rank}` in an argument or variable is the rank; `patch` is code that each rank runs
        first.
        """
        return self.ask(
            count, arguments=self.tiny(*arguments), patch=patch, environment=environment
        )

    def program(
        self, program: str, count: int, *arguments: str, ends: tuple[int, ...] | None = None
    ) -> list[list[Any]]:
        """What each of `count` gloo ranks reported that ran `program`; `ends`: their exit codes
        where not all are 0.
        """
        ended = self.ask(count, program=program, arguments=arguments).wait()
        assert tuple(ended.codes) == (ends or (0,) * count), "\n".join(
            text[-2000:] for text in ended.err
        )
        lines = [
            [line for line in out.splitlines() if line.startswith("RESULT ")] for out in ended.out
        ]
        return [[json.loads(line.removeprefix("RESULT ")) for line in each] for each in lines]

    def __call__(self, count: int, *arguments: str, patch: str = "", **environment: str) -> Ended:
        return self.start(count, *arguments, patch=patch, **environment).wait()

    def train(self, count: int, name: str, *arguments: str, **options: str) -> None:
        """A run that must succeed, with each planned layer called on the rank that holds it."""
        ended = self(count, f"run.name={name}", *arguments, **options)
        assert ended.codes == [0] * count, ended.err
        assert "in the first step" not in ended.err

    def reference(self, *arguments: str, patch: str = "", count: int = 1) -> Path:
        """The run of one rank, or of `count`, with these arguments, which is trained once for all
        tests that compare with it.
        """
        words = "\n".join((*arguments, patch, str(count)))
        name = hashlib.sha256(words.encode()).hexdigest()[:16]
        shared = Ranks(self.server, self.text, self.server.folder)
        run = shared.folder / "runs" / name
        if not (run / "whole").exists():
            shared.train(count, name, *arguments, patch=patch)
            (run / "whole").touch()
        return run

    # -- what a run left ---------------------------------------------------------------------------

    def run(self, name: str | Path) -> Path:
        return self.folder / "runs" / name

    def losses(self, name: str | Path) -> list[dict[str, Any]]:
        """Every logged number of every step but for speeds and for statistics, which are those of
        the lead's layers.
        """
        lines = [
            json.loads(line) for line in (self.run(name) / "metrics.jsonl").read_text().splitlines()
        ]
        kept = ("step", "train/", "val/", "precision/", "experts/")
        return [
            {k: v for k, v in line.items() if k.startswith(kept)}
            for line in lines
            if "train/loss" in line
        ]

    def state(self, name: str | Path) -> dict[str, bytes]:
        """The newest checkpoint: the bytes of every tensor."""
        tensors = checkpoint.load(self.run(name) / "checkpoints").tensors
        return {
            key: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            for key, tensor in tensors.items()
        }

    def same(self, one: str | Path, other: str | Path) -> None:
        """Assert that two runs are equal in every bit: losses, norms, weights, moments, scales."""
        assert self.losses(one) == self.losses(other)
        assert self.state(one) == self.state(other)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def serving(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., AbstractContextManager[Server]]:
    """`serving(*modules, NAME=value)` starts ranks that begin with these modules of
    tests/backends/te besides their own, in an environment with these variables.
    """
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(
        filter(None, (str(tests / "backends" / "te"), os.environ.get("PYTHONPATH")))
    )
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    @contextmanager
    def start(*modules: str, **variables: str) -> Iterator[Server]:
        environment = inherited | variables
        command = [sys.executable, str(tests / "helpers" / "rank_server.py"), *modules]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path.cwd(),
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            yield Server(process, tmp_path_factory.mktemp("references"))
            process.stdin.close()

    return start


@pytest.fixture(scope="session")
def server(
    serving: Callable[..., AbstractContextManager[Server]],
) -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture(scope="session")
def rank_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text with something to learn in it."""
    words = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "4", "8", "bits")
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(draw.choice(words) for _ in range(4000)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_ranks(
    server: Server, rank_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Ranks]:
    """For fixtures that several tests share: ranks with a folder of their own."""
    return lambda: Ranks(server, rank_text, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def ranks(server: Server, rank_text: Path, tmp_path: Path) -> Ranks:
    return Ranks(server, rank_text, tmp_path)
