"""Run directories that somebody else prepared: they reach nothing outside, hang nothing, and print no escapes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from storms.ground import (
    ESCAPES,
    ON,
    TINY,
    Ground,
    Result,
    begin,
    call,
    end_measured,
    explained,
    small_memory,
)

SECONDS = 60.0
"""Processor time that a command on a tiny run may take, whatever its files hold."""
NAMES = (
    ".lock",
    ".new",
    ".metrics.jsonl.tmp",
    "metrics.jsonl",
    "metrics.jsonl.damaged",
    "config.yaml",
    "plan.txt",
    "curves.png",
    "heartbeat.json",
    "history.jsonl",
    "statistics.bin",
    "studies",
    "studies/x/rank.json",
    "swap_requests",
    "swap_requests/1.json",
    "checkpoints",
    "checkpoints/step_00000004",
    "checkpoints/step_00000004/state.json",
    "checkpoints/step_00000004/weights.safetensors",
)
REPORTS = (
    ("report", "runs/a"),
    ("compare", "runs/a", "runs/a"),
    ("plan", "runs/a"),
    ("swap", "runs/a", "recipe=bf16"),
    ("export", "runs/a", "to=hf", "out=out"),
)
RANK = ("rank", "runs/a", "recipe=bf16,mxfp8", "steps=1", "forks=1", "batches=1")
SENSITIVITY = ("sensitivity", "runs/a", "recipe=mxfp8", "batches=1")
ACTS = (ON, (*TINY, "run.name=a", "run.overwrite=true"), *REPORTS)
READERS = (ON, (*ON, "run.name=b"), (*ON, "checkpoint.keep=1"), RANK, SENSITIVITY, *REPORTS)
SECRET = "my-own-secret-words "


def outside_of(place: Path) -> Path:
    """Things beside the run that are not its business."""
    outside = place / "outside"
    (outside / "step_00000003").mkdir(parents=True)
    (outside / "step_00000003/state.json").write_text("precious")
    (outside / "file").write_text('{"step": 0}\n')
    (outside / "secret").write_text(SECRET * 1000)
    return outside


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def thing_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    """A link, a pipe, a folder or a huge file among a run's files."""
    run = ground.copy(place) / "runs/a"
    outside = outside_of(place)
    name = draw.choice(NAMES)
    thing = run / name
    thing.parent.mkdir(parents=True, exist_ok=True)
    if thing.is_dir():
        shutil.rmtree(thing)
    thing.unlink(missing_ok=True)
    things: dict[str, Callable[[], None]] = {
        "link to a file": lambda: thing.symlink_to(outside / "file"),
        "link to a folder": lambda: thing.symlink_to(outside),
        "dangling link": lambda: thing.symlink_to(outside / "made"),
        "pipe": lambda: os.mkfifo(thing),
        "folder": thing.mkdir,
        "huge": lambda: enlarge(thing),
    }
    kind = draw.choice(tuple(things))
    things[kind]()
    return bounded(kind, place, draw.choice(ACTS), name)


def enlarge(path: Path, size: int = 1 << 36) -> None:
    """Make a sparse file of so many bytes."""
    with path.open("ab") as file:
        file.truncate(size)


def bounded(kind: str, place: Path, act: tuple[str, ...], what: str = "") -> Result:
    """A command that leaves what is outside of the run, within bounds of memory and time."""
    outside = place / "outside"
    before = contents(outside)
    ended = end_measured(begin(place, *act, around=small_memory), place)
    untouched = contents(outside) == before
    passed = untouched and explained(ended.code, ended.out) and ended.seconds < SECONDS
    cost = f"exit {ended.code}, {ended.seconds:.0f} s, outside untouched {untouched}"
    return Result(kind, passed, f"{what} {act[0]}: {cost}: {ended.out[-400:]}")


def seal(run: Path, body: str) -> None:
    """Write the text of a run's configuration with its identity and a checksum that fits."""
    path = run / "config.yaml"
    identity = path.read_text().split()[3]
    checksum = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f"# fp4train run {identity} sha256 {checksum}\n{body}")


def resealed(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a run's configuration as an attacker would."""
    _, _, body = (run / "config.yaml").read_text().partition("\n")
    values = yaml.safe_load(body)
    change(values)
    seal(run, yaml.safe_dump(values))


PATHS = {
    "data.path": ("outside/secret", "../{place}/outside/secret", "/etc/hostname"),
    "data.cache_dir": ("outside/cache", "../{place}/outside"),
    "data.val_path": ("outside/secret",),
    "data.tokenizer": ("outside/secret",),
    "checkpoint.also": ("outside", "../{place}/outside"),
    "run.dir": ("outside/run",),
    "init": ("outside",),
    "resume": ("outside",),
    "plugins": ("outside.evil",),
}


def path_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    """A resealed configuration names a path outside of the run."""
    run = ground.copy(place) / "runs/a"
    outside = outside_of(place)
    key = draw.choice(tuple(PATHS))
    value = draw.choice(PATHS[key]).format(place=place.name)
    act = draw.choice(READERS)
    name = draw.choice(("a", ".kube", "../../outside/x"))

    def change(values: dict[str, Any]) -> None:
        values["run"]["name"] = name
        section, _, last = key.rpartition(".")
        table = values[section] if section else values
        table[last] = [value] if key == "plugins" else value

    resealed(run, change)
    # The user of somebody else's run names the paths that are right: the others are what counts.
    if act[0].startswith(("resume", "rank", "sens")):
        right = {"data.path": "../text.txt", "data.cache_dir": "runs/a/cache"}
        act = (*act, *(f"{word}={path}" for word, path in right.items() if word != key))
    result = bounded(key, place, act, f"{key}={value}")
    # tokens of bytes are the text in another width
    wide = b"".join(bytes((byte, 0)) for byte in SECRET.encode())
    leaked = [
        path
        for path, data in contents(place).items()
        if outside not in path.parents and (SECRET.encode() in data or wide in data)
    ]
    return Result(f"leaked {leaked}", False, result.seen) if leaked else result


def escape_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    """Names of a run, a recipe or a swap that hold terminal escapes; none reaches the terminal."""
    run = ground.copy(place) / "runs/a"
    text = draw.choice(ESCAPES)
    kind = draw.choice(("run.name", "metrics", "history", "model"))

    def change(values: dict[str, Any]) -> None:
        if kind == "model":
            values["model"][text] = text
        else:
            values["run"]["name"] = text

    if kind in ("metrics", "history"):
        rewrite(run / f"{kind}.jsonl", text)
    else:
        resealed(run, change)
    act = draw.choice((*ACTS, ("swap", "runs/a"), RANK))
    code, out = call(place, *act)
    shown = out.replace("\r\n", "\n").translate(dict.fromkeys(map(ord, "\n\t\r")))
    raw = [letter for letter in shown if letter < " " or "\x7f" <= letter < "\xa0"]
    passed = explained(code, out) and not raw and text not in out
    return Result(kind, passed, f"{text!r}, {act[0]}: exit {code}, raw {raw}: {out[-400:]!r}")


def rewrite(path: Path, text: str) -> None:
    """Put a text into the lines of a record, with checksums that fit: damage would hide it."""
    from fp4train.sealed import open_line, seal_line

    quoted = json.dumps(text)[1:-1]
    lines = []
    for raw in path.read_bytes().splitlines(keepends=True):
        table = json.dumps(open_line(raw))
        changed = table.replace("mxfp8", quoted).replace("MXFP8", quoted)
        lines.append(seal_line(changed.encode()))
    path.write_bytes(b"".join(lines))


YAML: dict[str, Callable[[str], str]] = {
    "deep lists": lambda body: "run: " + "[" * 100_000,
    "deep maps": lambda body: "".join(" " * n + "a:\n" for n in range(400)) + body,
    "flow maps": lambda body: body + "x: " + "{a: " * 20_000 + "1" + "}" * 20_000,
    "aliases": lambda body: "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n" + body,
    "code": lambda body: body + 'x: !!python/object/apply:os.system ["touch ../outside"]\n',
    "zero bytes": lambda body: body.replace("model", "mo\0del"),
    "twice": lambda body: body + body,
    "interpolation": lambda body: body.replace("name: a", "name: ${oc.env:HOME}"),
    "a list": lambda body: "- " + body.replace("\n", "\n  "),
    "long key": lambda body: body + "k" * 200_000 + ": 1\n",
    "numbers": lambda body: body.replace("steps: 4", "steps: " + "9" * 5000),
    "dates": lambda body: body.replace("steps: 4", "steps: 2001-01-01"),
}


def yaml_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    """A configuration whose YAML is made to hurt, with a checksum that fits."""
    run = ground.copy(place) / "runs/a"
    outside_of(place)
    kind = draw.choice(tuple(YAML))
    _, _, body = (run / "config.yaml").read_text().partition("\n")
    seal(run, YAML[kind](body))
    return bounded(kind, place, draw.choice(ACTS))


TRIALS = {"thing": thing_trial, "path": path_trial, "yaml": yaml_trial, "escape": escape_trial}


def hostile_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    name = draw.choice(tuple(TRIALS))
    result = TRIALS[name](ground, place, draw)
    return Result(f"{name}: {result.kind}", result.passed, result.seen)


# -- texts and sizes that take long, or all memory -------------------------------------------------


def append(name: str, text: str, run: Path) -> None:
    with (run / name).open("a") as file:
        file.write(text)


def repeat_last_line(name: str, size: int, run: Path) -> None:
    *_, last = (run / name).read_text().splitlines(keepends=True)
    append(name, last * (size // len(last)), run)


def configure(section: str, key: str, value: Any, run: Path) -> None:
    resealed(run, lambda values: values[section].update({key: value}))


def many_folders(folder: str, name: str, run: Path) -> None:
    for number in range(20_000):
        (run / folder / name.format(number)).mkdir(parents=True, exist_ok=True)


SIZES: dict[str, Callable[[Path], None]] = {
    "sparse metrics of 6 GB": lambda run: enlarge(run / "metrics.jsonl", 6 << 30),
    "sparse statistics of 6 GB": lambda run: enlarge(run / "statistics.bin", 6 << 30),
    "sparse history of 6 GB": lambda run: enlarge(run / "history.jsonl", 6 << 30),
    "sparse configuration of 6 GB": lambda run: enlarge(run / "config.yaml", 6 << 30),
    "block marks": partial(append, "statistics.bin", "f4s1" * 1_500_000),
    "history of one line 0.7 MB": partial(repeat_last_line, "history.jsonl", 740_000),
    "metrics of one line 20 MB": partial(repeat_last_line, "metrics.jsonl", 20_000_000),
    "deep metrics": partial(append, "metrics.jsonl", ("[" * 200_000 + "\n") * 5),
    "model.layers=2000000": partial(configure, "model", "layers", 2_000_000),
    "model.width=2**40": partial(configure, "model", "width", 1 << 40),
    "train.steps=10**18": partial(configure, "train", "steps", 10**18),
    "20,000 checkpoints": partial(many_folders, "checkpoints", "step_{:08d}"),
    "20,000 studies": partial(many_folders, "studies", "s{}"),
}


def size_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each kind in turn with each verb in turn."""
    run = ground.copy(place) / "runs/a"
    kind = tuple(SIZES)[number % len(SIZES)]
    SIZES[kind](run)
    verbs = (*REPORTS[:3], ("swap", "runs/a"), ON)
    return bounded(kind, place, verbs[number // len(SIZES) % len(verbs)])
