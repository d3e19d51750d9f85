"""Whole commands: killed at random moments, started without standard streams, given bad values."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from storms.ground import (
    EXPORTS,
    ON,
    SCENARIOS,
    TINY,
    Ground,
    Result,
    begin,
    call,
    explained,
    goes_on,
    losses,
)


def kill_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Commands that are killed (SIGKILL), and given again."""
    name = draw.choice(tuple(SCENARIOS))
    ground.copy(place)
    seconds = ground.undisturbed(name).seconds
    for _ in range(draw.randint(1, 3)):
        pid = begin(place, *SCENARIOS[name].command)
        time.sleep(draw.random() * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    seen = goes_on(ground, name, place)
    return Result(name, not seen, seen)


STREAMS = ("<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-")
STREAMED = {
    **{SCENARIOS[name].command: 0 for name in ("resume", "start", "swap", *EXPORTS)},
    ("plan", "runs/a"): 0,
    ("formats",): 0,
    ("compare", "runs/a", "runs/a"): 0,
    ("report", "runs/a"): 0,
    ("resume=runs/nowhere",): 1,
    ("train.steps=no",): 1,
    ("swap", "runs/a", "recipe=nowhere"): 1,
}
"""Commands, and the exit codes that they have."""


def stream_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A process of its own, because Python looks at the streams when it starts."""
    ground.copy(place)
    streams = STREAMS[-1 - number % len(STREAMS)]
    command = tuple(STREAMED)[number % len(STREAMED)]
    shell = f'"$@" {streams}'
    words = ["sh", "-c", shell, "sh", sys.executable, "-m", "fp4train", *command]
    ended = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=600)
    out = ended.stdout + ended.stderr
    passed = ended.returncode == STREAMED[command] and "Traceback" not in out
    if command is ON:
        undisturbed = ground.undisturbed("resume").result["losses"]
        passed = passed and losses(place / "runs/a") == undisturbed
    seen = f"{' '.join(command)}: exit {ended.returncode}: {out[-500:]}"
    return Result(streams, passed, seen)


KEYS = (
    "train.steps",
    "train.batch_size",
    "train.seq_len",
    "train.step_timeout",
    "train.microbatch",
    "run.seed",
    "run.name",
    "eval.every",
    "eval.batches",
    "checkpoint.every",
    "checkpoint.keep",
    "optim.lr",
    "optim.betas",
    "schedule.warmup",
    "policy.last",
    "model.width",
    "model.heads",
    "recipe",
    "backend",
    "device",
    "data.path",
)
NUMBERS = ("-1", "nan", "1.5", "1e400", "-inf", "1e18", "1000000000000000000", "1e38")
VALUES = (*NUMBERS, "abc", "[]", "{a: 1}", "''", "[1,2,3]", "${nowhere}", "true", "../..")
ENDLESS = {("train.steps", "1e18"), ("train.steps", "1000000000000000000"), ("train.steps", "1e38")}


def input_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each key with each bad value, in an order of its own."""
    pairs = [pair for pair in itertools.product(KEYS, VALUES) if pair not in ENDLESS]
    random.Random(number // len(pairs)).shuffle(pairs)
    key, value = pairs[number % len(pairs)]
    words = (*TINY, "run.name=a", "train.steps=1", f"data.cache_dir={ground.folder / 'cache'}")
    sound = [word for word in words if word.partition("=")[0] != key]
    code, out = call(place, *sound, f"{key}={value}")
    passed = explained(code, out) and (code == 0 or out.count("fp4train: ") == 1)
    return Result(key, passed, f"{key}={value}: exit {code}: {out[-400:]}")
