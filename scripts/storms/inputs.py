"""Command lines with bad values."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from storms.ground import TINY, Ground, Result, call, explained

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
VALUES = (
    "-1",
    "nan",
    "abc",
    "[]",
    "{a: 1}",
    "1.5",
    "''",
    "[1,2,3]",
    "1e400",
    "-inf",
    "${nowhere}",
    "true",
    "../..",
    "1e18",
    "1000000000000000000",
    "1e38",
)
ENDLESS = {("train.steps", "1e18"), ("train.steps", "1000000000000000000"), ("train.steps", "1e38")}


def input_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each key with each value, in an order of its own."""
    pairs = [pair for pair in itertools.product(KEYS, VALUES) if pair not in ENDLESS]
    random.Random(number // len(pairs)).shuffle(pairs)
    key, value = pairs[number % len(pairs)]
    arguments = [*TINY, "run.name=a", "train.steps=1", f"data.cache_dir={ground.folder / 'cache'}"]
    code, out = call(place, *[a for a in arguments if a.partition("=")[0] != key], f"{key}={value}")
    passed = explained(code, out) and (code == 0 or out.count("fp4train: ") == 1)
    return Result(key, passed, "" if passed else f"{key}={value}: exit {code}: {out[-400:]}")
