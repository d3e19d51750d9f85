"""Run directories that somebody else prepared: they reach nothing outside, hang nothing, and print no escapes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from storms.ground import ON, TINY, Ground, Result, begin, call, end_measured, explained
from storms.surroundings import small_memory

NAMES = (
    ".lock",
    "metrics.jsonl",
    "config.yaml",
    "plan.txt",
    "curves.png",
    "heartbeat.json",
    "history.jsonl",
    "metrics.jsonl.damaged",
    "statistics.bin",
    "studies",
    "studies/x",
    "studies/x/rank.json",
    "checkpoints",
    "swap_requests",
    "swap_requests/1.json",
    "checkpoints/step_00000004",
    *(
        f"checkpoints/step_00000004/{name}"
        for name in ("state.json", "tensors.safetensors", "weights.safetensors")
    ),
    "wandb",
    ".new",
    ".metrics.jsonl.tmp",
    ".curves.png.tmp",
    ".config.yaml.1",
)
ACTS = (
    ON,
    (*TINY, "run.name=a", "run.overwrite=true"),
    ("swap", "runs/a", "recipe=bf16"),
    ("report", "runs/a"),
    ("compare", "runs/a", "runs/a"),
    ("plan", "runs/a"),
    ("export", "runs/a", "to=hf", "out=out"),
)
SECRET = "my-own-secret-words "


def outside_of(place: Path) -> Path:
    """Things beside the run that are not its business."""
    outside = place / "outside"
    (outside / "step_00000003").mkdir(parents=True)
    (outside / "step_00000003/state.json").write_text("precious")
    (outside / "file").write_text('{"step": 0}\n')
    (outside / "secret").write_text(SECRET * 1000)
    return outside


def held(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def thing_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A link, a pipe, a folder or a huge file among a run's files."""
    run = ground.copy(place) / "runs/a"
    outside = outside_of(place)
    name = draw.choice(NAMES)
    thing = run / name
    thing.parent.mkdir(parents=True, exist_ok=True)
    if thing.is_dir():
        shutil.rmtree(thing)
    thing.unlink(missing_ok=True)
    kind = draw.choice(
        ("link to a file", "link to a folder", "dangling link", "pipe", "folder", "huge")
    )
    if kind == "link to a file":
        thing.symlink_to(outside / "file")
    elif kind == "link to a folder":
        thing.symlink_to(outside)
    elif kind == "dangling link":
        thing.symlink_to(outside / "made")
    elif kind == "pipe":
        os.mkfifo(thing)
    elif kind == "folder":
        thing.mkdir()
    else:
        with thing.open("wb") as file:
            file.truncate(1 << 36)
    before = held(outside)
    act = draw.choice(ACTS)
    code, out = call(place, *act)
    passed = held(outside) == before and explained(code, out)
    seen = f"{name}, {act[0]}: exit {code}, outside {held(outside) == before}: {out[-400:]}"
    return Result(kind, passed, "" if passed else seen)


def resealed(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a run's configuration as an attacker would: with its identity and a checksum that
    fits.
    """
    path = run / "config.yaml"
    head, _, body = path.read_text().partition("\n")
    values = yaml.safe_load(body)
    change(values)
    body = yaml.safe_dump(values)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f"# fp4train run {head.split()[3]} sha256 {checksum}\n{body}")


PATHS = (
    *(
        ("data.path", "outside/secret"),
        ("data.path", "../{place}/outside/secret"),
        ("data.path", "/etc/hostname"),
    ),
    *(
        ("data.cache_dir", "outside/cache"),
        ("data.cache_dir", "../{place}/outside"),
        ("data.val_path", "outside/secret"),
    ),
    *(
        ("checkpoint.also", "outside"),
        ("checkpoint.also", "../{place}/outside"),
        ("run.dir", "outside/run"),
    ),
    *(
        ("init", "outside"),
        ("resume", "outside"),
        ("plugins", ["outside.evil"]),
        ("data.tokenizer", "outside/secret"),
    ),
)
READERS = (
    *(ON, (*ON, "run.name=b"), (*ON, "checkpoint.keep=1")),
    ("rank", "runs/a", "recipe=bf16,mxfp8", "steps=1", "forks=1", "batches=1"),
    ("sensitivity", "runs/a", "recipe=mxfp8", "batches=1"),
    *(
        ("report", "runs/a"),
        ("compare", "runs/a", "runs/a"),
        ("plan", "runs/a"),
        ("swap", "runs/a", "recipe=bf16"),
    ),
    ("export", "runs/a", "to=hf", "out=out"),
)


def path_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A resealed configuration names a path outside of the run."""
    run = ground.copy(place) / "runs/a"
    outside = outside_of(place)
    (key, value), act = draw.choice(PATHS), draw.choice(READERS)
    name = draw.choice(("a", ".kube", "../../outside/x"))

    def change(values: dict[str, Any]) -> None:
        values["run"]["name"] = name
        section, _, last = key.rpartition(".")
        (values[section] if section else values)[last] = (
            value.format(place=place.name) if isinstance(value, str) else value
        )

    resealed(run, change)
    # The paths that are right are named, as the user of somebody else's run would, so that the
    # others are what counts.
    right = {"data.path": "../text.txt", "data.cache_dir": "runs/a/cache"}
    named = (
        [f"{k}={v}" for k, v in right.items() if k != key]
        if act[0].startswith(("resume", "rank", "sens"))
        else []
    )
    before = held(outside)
    code, out = call(place, *act, *named)
    leaked = [
        p
        for p in place.rglob("*")
        if p.is_file() and outside not in p.parents and SECRET.encode() in p.read_bytes()
    ]
    # Tokens of bytes are the text in another width.
    wide = b"".join(bytes((each, 0)) for each in SECRET.encode())
    leaked += [p for p in place.rglob("*.bin") if wide in p.read_bytes()]
    passed = held(outside) == before and not leaked and explained(code, out)
    seen = (
        f"{key}={value}, {act[0]}: exit {code}, outside {held(outside) == before}, leaked "
        f"{leaked}: {out[-400:]}"
    )
    return Result(key, passed, "" if passed else seen)


ESCAPES = ("\x1b[31mred", "\x1b]0;title\x07", "a\x9b2Jb", "x\rcovered", "\x1b[2J\x1b[H")


def escape_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Names of a run, a recipe or a swap that hold terminal escapes; none reaches the terminal."""
    run = ground.copy(place) / "runs/a"
    text = draw.choice(ESCAPES)
    kind = draw.choice(("run.name", "metrics", "history", "recipe"))
    if kind in ("run.name", "recipe"):

        def change(values: dict[str, Any]) -> None:
            values["run" if kind == "run.name" else "model"][
                "name" if kind == "run.name" else text
            ] = text

        resealed(run, change)
    else:
        rewritten(
            run / f"{kind}.jsonl", lambda line: line.replace("mxfp8", text).replace("MXFP8", text)
        )
    act = draw.choice(
        (*ACTS, ("swap", "runs/a"), ("rank", "runs/a", "steps=1", "forks=1", "batches=1"))
    )
    code, out = call(place, *act)
    raw = [
        c
        for c in out.replace("\r\n", "\n")
        if (ord(c) < 32 and c not in "\n\t\r") or 0x7F <= ord(c) < 0xA0
    ]
    raw += [text] if text in out else []
    passed = explained(code, out) and not raw
    return Result(
        kind,
        passed,
        "" if passed else f"{text!r}, {act[0]}: exit {code}, raw {raw}: {out[-400:]!r}",
    )


def rewritten(path: Path, change: Callable[[str], str]) -> None:
    """Change the texts in the lines of a record, with checksums that fit: damage would hide
    them.
    """
    from fp4train.sealed import Chain, config_parts

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(part) for key, part in value.items()}
        if isinstance(value, list):
            return [changed(part) for part in value]
        return change(value) if isinstance(value, str) else value

    header, _ = config_parts(path.with_name("config.yaml"))
    chain = Chain(header[0] if header and path.name == "metrics.jsonl" else "")
    lines = [Chain().open(raw)[0] for raw in path.read_bytes().splitlines(keepends=True)]
    path.write_bytes(b"".join(chain.seal(json.dumps(changed(line)).encode()) for line in lines))


def hostile_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    trial = draw.choice((thing_trial, path_trial, yaml_trial, escape_trial))
    result = trial(ground, place, draw, number)
    return Result(
        f"{trial.__name__.removesuffix('_trial')}: {result.kind}", result.passed, result.seen
    )


# -- texts and sizes that take long, or all memory -------------------------------------------------

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


def yaml_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """A configuration whose YAML is made to hurt, with a checksum that fits."""
    run = ground.copy(place) / "runs/a"
    outside = outside_of(place)
    kind = draw.choice(tuple(YAML))
    head, _, body = (run / "config.yaml").read_text().partition("\n")
    body = YAML[kind](body)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    (run / "config.yaml").write_text(f"# fp4train run {head.split()[3]} sha256 {checksum}\n{body}")
    before = held(outside)
    act = draw.choice(ACTS)
    return _bounded(kind, place, act, lambda: held(outside) == before)


def _bounded(
    kind: str, place: Path, act: tuple[str, ...], untouched: Callable[[], bool] = lambda: True
) -> Result:
    """A command within bounds of memory and processor time."""
    ended = end_measured(begin(place, *act, around=small_memory), place)
    passed = explained(ended.code, ended.out) and untouched() and ended.seconds < SECONDS
    seen = f"{act[0]}: exit {ended.code}, {ended.seconds:.0f} s: {ended.out[-400:]}"
    return Result(kind, passed, "" if passed else seen)


SECONDS = 60.0
"""Processor time that a command on a tiny run may take, whatever its files hold."""


def _sparse(name: str, size: int) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.truncate(size)

    return make


def _text(name: str, text: str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / name).write_text(text)

    return write


def _heads(run: Path) -> None:
    data = (run / "statistics.bin").read_bytes()
    (run / "statistics.bin").write_bytes(data + data[:20] * (6_000_000 // 20))


def _magic(run: Path) -> None:
    (run / "statistics.bin").write_bytes(b"f4s1" * 1_500_000)


def _lines(name: str, line: str, times: int) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write(line * times)

    return make


def _repeated(name: str, size: int) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(lines) + lines[-1] * (size // len(lines[-1])))

    return make


def _configured(section: str, key: str, value: Any) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        def change(values: dict[str, Any]) -> None:
            (values[section] if section else values)[key] = value

        resealed(run, change)

    return make


def _named(folder: str, form: str, count: int) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / folder).mkdir(exist_ok=True)
        for number in range(count):
            (run / folder / form.format(number)).touch()

    return make


def _phases(run: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        phase = {"_target_": "fp4train.precision.Phase", "recipe": values["recipe"], "start": 0.5}
        values["phases"] = {f"p{n}": phase for n in range(20_000)}

    resealed(run, change)


SIZES: dict[str, Callable[[Path], None]] = {
    "sparse metrics of 6 GB": _sparse("metrics.jsonl", 6 << 30),
    "sparse statistics of 6 GB": _sparse("statistics.bin", 6 << 30),
    "sparse history of 6 GB": _sparse("history.jsonl", 6 << 30),
    "sparse configuration of 6 GB": _sparse("config.yaml", 6 << 30),
    "block heads": _heads,
    "block marks": _magic,
    "history of one line 0.7 MB": _repeated("history.jsonl", 740_000),
    "metrics of one line 20 MB": _repeated("metrics.jsonl", 20_000_000),
    "deep metrics": _lines("metrics.jsonl", "[" * 200_000 + "\n", 5),
    "model.layers=2000000": _configured("model", "layers", 2_000_000),
    "model.width=2**40": _configured("model", "width", 1 << 40),
    "train.steps=10**18": _configured("train", "steps", 10**18),
    "20,000 phases": _phases,
    "run [[[ of 200 kB": _text("config.yaml", "run: " + "[" * 200_000),
    "20,000 requests": _named("swap_requests", "{:08d}.json", 20_000),
    "20,000 checkpoints": _named("checkpoints", "step_{:08d}", 20_000),
    "20,000 studies": _named("studies", "s{}", 20_000),
}
SIZED = (
    ("report", "runs/a"),
    ("compare", "runs/a", "runs/a"),
    ON,
    ("plan", "runs/a"),
    ("swap", "runs/a"),
)


def size_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each kind in turn with each verb in turn."""
    run = ground.copy(place) / "runs/a"
    kind = tuple(SIZES)[number % len(SIZES)]
    SIZES[kind](run)
    return _bounded(kind, place, SIZED[number // len(SIZES) % len(SIZED)])
