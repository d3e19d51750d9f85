"""Storms of faults against real runs: kills, damaged bytes, hostile directories, bad input. Seeded and counted.

    python scripts/storm.py                     # some minutes on two cores
    python scripts/storm.py --all jobs=2        # the counts of benchmarks/reliability.md, which it writes anew
    python scripts/storm.py kills=50 damages=10000 resumes=20 hostile=20 inputs=30 jobs=8 seed=1 record=storm.jsonl

| storm | one trial | passes when |
|---|---|---|
| kills | a run is killed (SIGKILL) once to three times at random moments, each time resumed | its losses equal an \
undisturbed run's in every bit |
| damages | one random change of bytes (flip, cut, zeros, removal) in one file of a run, which is then read | what is \
read equals what was written, or the file is named in a message |
| resumes | the same, then a resume | it ends as an undisturbed run does in every bit, with a warning where the file \
counts; or refuses in one line |
| hostile | links, pipes, folders or huge files among a run's files, then a resume, an overwrite, a swap | nothing \
outside of the run changes, nothing hangs, no traceback |
| inputs | a command line with a bad value | it ends with exit code 0, or with one line and exit code 1 |

Trials are forks of a process that has imported everything, or calls in it. `record=FILE` keeps each result as it comes:
the same command again goes on after those (--all records into storm.jsonl). Says on standard error how far it is, and
which trial failed; prints a table at the end. The exit code is 1 if a trial failed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 300.0
REPORT = ROOT / "benchmarks/reliability.md"
STEPS = 12
TINY = (
    *("model.width=32", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.hidden=64", "data=text"),
    *("train.batch_size=4", "train.seq_len=32", "eval.batches=1", "eval.every=0", "track=jsonl", "phases=none"),
    *("schedule=constant", "schedule.warmup=0", "checkpoint.every=2", f"train.steps={STEPS}"),
)
FILES = (
    *("config.yaml", "metrics.jsonl", "swaps.json", "history.jsonl", "plan.txt", "heartbeat.json"),
    *("checkpoints/*/state.json", "checkpoints/*/tensors.safetensors", "cache/*.bin", "cache/*.json"),
)
READ = {
    **{name: name for name in ("config.yaml", "metrics.jsonl", "swaps.json", "history.jsonl")},
    **{"state.json": "checkpoints/*/state.json", "tensors.safetensors": "checkpoints/*/tensors.safetensors"},
    **{"cache.bin": "cache/*.bin", "cache.json": "cache/*.json"},
}
"""The files that a resume reads, by what the table calls them."""


@dataclass(frozen=True)
class Result:
    """Of one trial: what was done, whether it went as it should, and what was seen otherwise."""

    kind: str
    passed: bool
    seen: str = ""


@dataclass
class Ground:
    """Where storms take place: a text, a stopped run that the trials copy, and the losses of the undisturbed one.

    `seconds` is how long a resume of it takes, `read` what its files hold when they are whole.
    """

    folder: Path
    losses: dict[int, float] = field(default_factory=dict)
    seconds: float = 1.0
    read: dict[str, Any] = field(default_factory=dict)


def begin(place: Path, *arguments: str) -> int:
    """Run a command in a fork of this process, its output in a file beside `place`; returns the process."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        out = os.open(_output(place), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(place)
        sys.stdout, sys.stderr = io.TextIOWrapper(os.fdopen(1, "wb")), io.TextIOWrapper(os.fdopen(2, "wb", 0))
        sys.stderr.reconfigure(write_through=True)  # type: ignore[union-attr]
        from fp4train.cli import main

        try:
            main(list(arguments))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        sys.stdout.flush()
    finally:
        os._exit(code)


def end(pid: int, place: Path, seconds: float = PATIENCE) -> tuple[int, str]:
    """Exit code and all output of a command; -1 for what hangs."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), _output(place).read_text(errors="replace")
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -1, "hangs"
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def call(place: Path, *arguments: str, seconds: float = PATIENCE) -> tuple[int, str]:
    """Exit code and all output of a command."""
    return end(begin(place, *arguments), place, seconds)


def _output(place: Path) -> Path:
    return place.with_name(f"{place.name}.out")


def losses(run: Path) -> dict[int, float]:
    """Training losses by step."""
    found: dict[int, float] = {}
    for line in (run / "metrics.jsonl").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, AttributeError):
            values = json.loads(line)
            if "train/loss" in values:
                found[values["step"]] = values["train/loss"]
    return found


def prepare(folder: Path) -> Ground:
    """A text, its tokens, and a run stopped at step 8 by its length, with a swap; then the undisturbed end."""
    draw = random.Random(0)
    (folder / "text.txt").write_text(" ".join(draw.choice(("the", "quick", "fox", "4", "bits")) for _ in range(4000)))
    ground = Ground(folder)
    base = folder / "base"
    base.mkdir()
    for arguments in (
        (*TINY, "run.name=a", "train.steps=4", "data.path=../text.txt", "data.cache_dir=runs/a/cache"),
        ("resume=runs/a", "recipe=mxfp8", "train.steps=8"),
    ):
        code, out = call(base, *arguments)
        if code:
            raise SystemExit(f"the base run failed: {out}")
    shutil.copytree(base, folder / "whole")
    began = time.monotonic()
    code, out = call(folder / "whole", "resume=runs/a", f"train.steps={STEPS}")
    ground.seconds = time.monotonic() - began
    if code:
        raise SystemExit(f"the whole run failed: {out}")
    ground.losses = losses(folder / "whole/runs/a")
    return ground


def kill_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    shutil.copytree(ground.folder / "base", place, dirs_exist_ok=True)
    kills = draw.randint(1, 3)
    for _ in range(kills):
        pid = begin(place, "resume=runs/a", f"train.steps={STEPS}")
        time.sleep(draw.random() * ground.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    code, out = call(place, "resume=runs/a", f"train.steps={STEPS}")
    same = losses(place / "runs/a") == ground.losses
    finished = code == 0 and same
    return Result(f"{kills} in a run", finished, "" if finished else f"exit {code}, equal {same}: {out[-300:]}")


def damage(path: Path, draw: random.Random) -> str:
    """Change the bytes of a file; returns how."""
    data = bytearray(path.read_bytes())
    how = draw.choice(("flip", "flip", "flip", "cut", "zeros", "gone"))
    at = draw.randrange(max(1, len(data)))
    if how == "gone":
        path.unlink()
        return how
    if how == "flip" and data:
        data[at] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del data[at:]
    else:
        end = min(len(data), at + draw.randint(1, 4096))
        data[at:end] = bytes(end - at)
    path.write_bytes(data)
    return how


class Messages(logging.Handler):
    """What is logged as a warning or an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def read_part(run: Path, kind: str) -> Any:
    """What fp4train reads from the files of `kind` when it goes on with `run`."""
    from fp4train import checkpoint
    from fp4train.config.schema import plain
    from fp4train.data import cache
    from fp4train.run import directory, history, resume
    from fp4train.run.belonging import check_belongs
    from fp4train.run.swaps import read_entries
    from fp4train.track.metrics import mend, read_metrics

    if kind == "config.yaml":
        check_belongs(checkpoint.load(run / "checkpoints"), run, mend=True)
        return plain(directory.read_config(run)), directory.identity(run)
    if kind == "history.jsonl":
        resume._check_edits(run, directory.read_config(run))
        return history.read_history(run)
    if kind in ("cache.bin", "cache.json"):
        (path,) = {p.with_suffix(".bin") for p in (run / "cache").glob("*.*")}
        found = cache._read(path)
        return None if found is None else found.tobytes()
    start = checkpoint.load(run / "checkpoints")
    if kind == "metrics.jsonl":
        for text in mend(run / kind, start.step, start.state.get("metrics")):  # type: ignore[arg-type]
            logging.getLogger("fp4train").warning("%s", text)
        return read_metrics(run / kind)
    if kind == "swaps.json":
        check_belongs(start, run, mend=True)
        return read_entries(run)
    for path, reason in start.skipped:
        logging.getLogger("fp4train").warning("%s: %s", path, reason)
    return start.step, start.state, {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in start.tensors.items()}


def damage_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """In this process: the files are read as a resume reads them, which takes milliseconds."""
    from fp4train.errors import UserError

    run = ground.folder / "read/runs/a"
    if not run.exists():
        shutil.copytree(ground.folder / "base", ground.folder / "read")
        ground.read = {kind: read_part(run, kind) for kind in READ}
    kind = draw.choice(tuple(READ))
    path = max(run.glob(READ[kind]))
    good = path.read_bytes()
    how = damage(path, draw)
    harmless = path.exists() and path.read_bytes() == good
    logger, messages = logging.getLogger("fp4train"), Messages()
    logger.handlers, before = [messages], logger.handlers
    seen = ""
    try:
        found = read_part(run, kind)
        named = bool(messages.lines) or (kind.startswith("cache") and found is None)
        if not (found == ground.read[kind] or named or harmless):
            seen = "read in silence"
    except UserError as error:
        seen = "" if len(str(error).splitlines()) == 1 else f"no line: {error}"
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
    finally:
        logger.handlers = before
    if kind == "metrics.jsonl":
        (run / "metrics.jsonl.damaged").unlink(missing_ok=True)
    path.write_bytes(good)
    return Result(kind, not seen, seen and f"{how} of {path.name}: {seen}")


def resume_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    shutil.copytree(ground.folder / "base", place, dirs_exist_ok=True)
    pattern = draw.choice(FILES)
    path = draw.choice(sorted((place / "runs/a").glob(pattern)))
    good = path.read_bytes()
    kind = pattern.rpartition("/")[2]
    how = damage(path, draw)
    harmless = path.exists() and path.read_bytes() == good
    code, out = call(place, "resume=runs/a", f"train.steps={STEPS}")
    found = losses(place / "runs/a") if (place / "runs/a/metrics.jsonl").exists() else {}
    refused = code == 1 and out.count("fp4train: ") == 1 and "Traceback" not in out
    as_it_should = {s: v for s, v in ground.losses.items() if s in found} == found and STEPS in found
    told = set(found) == set(ground.losses) or "left out" in out or "missing" in out
    passed = refused or (code == 0 and as_it_should and told)
    return Result(kind, passed, "" if passed or harmless else f"{how} of {path.name}: exit {code}: {out[-300:]}")


def hostile_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    shutil.copytree(ground.folder / "base", place, dirs_exist_ok=True)
    outside = place / "outside"
    (outside / "step_00000003").mkdir(parents=True)
    (outside / "step_00000003/state.json").write_text("precious")
    (outside / "file").write_text('{"step": 0}\n')
    run = place / "runs/a"
    name = draw.choice(
        (
            *(".lock", "metrics.jsonl", "config.yaml", "swaps.json", "plan.txt", "curves.png", "heartbeat.json"),
            *("history.jsonl", "metrics.jsonl.damaged"),
            *("checkpoints", "swap_requests", "swap_requests/1.json", "checkpoints/step_00000008"),
            *("checkpoints/step_00000008/state.json", "checkpoints/step_00000008/tensors.safetensors", "wandb", ".new"),
            *(".metrics.jsonl.tmp", ".curves.png.tmp", ".config.yaml.1"),
        )
    )
    thing = run / name
    thing.parent.mkdir(exist_ok=True)
    if thing.is_dir():
        shutil.rmtree(thing)
    thing.unlink(missing_ok=True)
    kind = draw.choice(("link to a file", "link to a folder", "dangling link", "pipe", "folder", "huge"))
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

    def state() -> dict[str, bytes]:
        return {str(p.relative_to(outside)): p.read_bytes() for p in outside.rglob("*") if p.is_file()}

    before = state()
    act = draw.choice(
        (
            ("resume=runs/a", f"train.steps={STEPS}"),
            (*TINY, "run.name=a", "data.path=../text.txt", "run.overwrite=true", "data.cache_dir=cache"),
            ("swap", "runs/a", "recipe=bf16"),
        )
    )
    code, out = call(place, *act, seconds=120)
    passed = state() == before and code in (0, 1) and "Traceback" not in out
    return Result(
        kind, passed, "" if passed else f"{name}, {act[0]}: exit {code}, outside {state() == before}: {out[-300:]}"
    )


KEYS = (
    *("train.steps", "train.batch_size", "train.seq_len", "train.step_timeout", "train.microbatch", "run.seed"),
    *("run.name", "eval.every", "eval.batches", "checkpoint.every", "checkpoint.keep", "optim.lr", "optim.betas"),
    *("schedule.warmup", "policy.last", "model.width", "model.heads", "recipe", "backend", "device", "data.path"),
)
VALUES = ("-1", "nan", "abc", "[]", "{a: 1}", "1.5", "''", "[1,2,3]", "1e400", "-inf", "${nowhere}", "true", "../..")


def input_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """Each key with each value, in an order of its own."""
    place.mkdir(exist_ok=True)
    pairs = list(itertools.product(KEYS, VALUES))
    random.Random(number // len(pairs)).shuffle(pairs)
    key, value = pairs[number % len(pairs)]
    arguments = [a for a in (*TINY, "run.name=a", "data.path=../text.txt", "data.cache_dir=cache", "train.steps=1")]
    code, out = call(place, *[a for a in arguments if a.partition("=")[0] != key], f"{key}={value}", seconds=120)
    passed = code in (0, 1) and "Traceback" not in out and (code == 0 or out.count("fp4train: ") == 1)
    return Result(key, passed, "" if passed else f"{key}={value}: exit {code}: {out[-300:]}")


STORMS: dict[str, tuple[Callable[[Ground, Path, random.Random, int], Result], int, int]] = {
    "kills": (kill_trial, 20, 500),
    "damages": (damage_trial, 1000, 10_000),
    "resumes": (resume_trial, 30, 300),
    "hostile": (hostile_trial, 30, 200),
    "inputs": (input_trial, 60, 300),
}
"""By name: a trial, how many there are usually, and with --all."""
SAID_EVERY = 10.0
"""Seconds between two lines that say how far a storm is."""


def storm(name: str, numbers: list[int], ground: Ground, seed: int, record: Path) -> None:
    """The trials `numbers` of one storm, one after another; each result is a line of `record`."""
    act, failed, said = STORMS[name][0], 0, time.monotonic()
    for done, number in enumerate(numbers, start=1):
        place = ground.folder / f"{name}_{number}"
        place.mkdir()
        result = act(ground, place, random.Random(f"{seed} {name} {number}"), number)
        failed += not result.passed
        with record.open("a") as file:
            file.write(json.dumps([seed, name, number, result.kind, result.passed, result.seen]) + "\n")
        shutil.rmtree(place, ignore_errors=True)
        _output(place).unlink(missing_ok=True)
        if not result.passed or done == len(numbers) or time.monotonic() - said > SAID_EVERY:
            said = time.monotonic()
            last = "" if result.passed else f"; {result.kind}: {result.seen}"
            print(f"{name}: {done} of {len(numbers)}, {failed} failed{last}", file=sys.stderr, flush=True)


def recorded(record: Path, seed: int) -> dict[tuple[str, int], tuple[str, bool, str]]:
    """(storm, number) → (kind, passed, seen) of the trials of `seed` that are done; a torn line is none."""
    found = {}
    for line in record.read_text().splitlines() if record.exists() else []:
        with contextlib.suppress(ValueError):
            of, name, number, kind, passed, seen = json.loads(line)
            if of == seed:
                found[name, number] = kind, passed, seen
    return found


def part(counts: dict[str, int], seed: int, record: Path, mine: int, of: int) -> None:
    """The trials whose number leaves `mine` when divided by `of`, in this process."""
    import torch

    import fp4train.analysis.curves
    import fp4train.cli
    import fp4train.run.build
    import fp4train.train  # noqa: F401 - forks of this process then start at once

    torch.set_num_threads(1)
    done = recorded(record, seed)
    left = {name: [n for n in range(mine, count, of) if (name, n) not in done] for name, count in counts.items()}
    with tempfile.TemporaryDirectory() as folder:
        ground = prepare(Path(folder)) if any(left.values()) else Ground(Path(folder))
        for name, numbers in left.items():
            storm(name, numbers, ground, seed, record)


def main(arguments: list[str]) -> int:
    """Run the storms in `jobs` processes; print the table."""
    whole, given = "--all" in arguments, dict(a.partition("=")[::2] for a in arguments if a != "--all")
    known = (*STORMS, "jobs", "seed", "record", "part")
    if strange := set(given) - set(known):
        print(f"unknown: {', '.join(sorted(strange))}; known: --all, {', '.join(known)}", file=sys.stderr)
        return 2
    jobs, seed = int(given.get("jobs", "1")), int(given.get("seed", "0"))
    counts = {name: int(given.get(name, str(every if whole else usual))) for name, (_, usual, every) in STORMS.items()}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(given.get("record", "storm.jsonl" if whole else f"{folder}/storm.jsonl")).absolute()
        if "part" in given:
            part(counts, seed, record, int(given["part"]), jobs)
            return 0
        words = [*(f"{name}={count}" for name, count in counts.items()), f"seed={seed}", f"record={record}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        parts = [
            subprocess.Popen([sys.executable, __file__, *words, f"jobs={jobs}", f"part={mine}"], env=environment)
            for mine in range(jobs)
        ]
        ended = [each.wait() for each in parts]
        rows = {key: row for key, row in recorded(record, seed).items() if key[1] < counts.get(key[0], 0)}
    lines, failures = table(rows)
    print("\n".join([*lines, *failures]))
    if whole and not any(ended):
        write_report(lines, failures, len(rows))
    return 1 if failures or any(ended) or len(rows) < sum(counts.values()) else 0


def table(rows: dict[tuple[str, int], tuple[str, bool, str]]) -> tuple[list[str], list[str]]:
    """A Markdown table of the results, and a line for each trial that failed."""
    trials = Counter((name, kind) for (name, _), (kind, *_) in rows.items())
    failed = Counter((name, kind) for (name, _), (kind, passed, _) in rows.items() if not passed)
    lines = ["| storm | of | trials | passed | failed |", "|---|---|---|---|---|"]
    for name in STORMS:
        kinds = sorted(kind for each, kind in trials if each == name)
        for kind in kinds:
            count, bad = trials[name, kind], failed[name, kind]
            lines.append(f"| {name} | {kind} | {count} | {count - bad} | {bad} |")
        if kinds:
            count, bad = sum(trials[name, k] for k in kinds), sum(failed[name, k] for k in kinds)
            lines.append(f"| **{name}** | all | {count} | {count - bad} | {bad} |")
    failures = [f"{name} {n} ({kind}): {seen}" for (name, n), (kind, ok, seen) in sorted(rows.items()) if not ok]
    return lines, failures


def write_report(lines: list[str], failures: list[str], trials: int) -> None:
    """Put the table in benchmarks/reliability.md, before its second heading."""
    import torch

    rest = REPORT.read_text()
    rest = rest[rest.index("\n## ") :]
    head = f"""# Fault tests

`python scripts/storm.py --all`, torch {torch.__version__} on a CPU: {trials:,} trials, {len(failures)} failed. Each row
counts the trials of one kind; `scripts/storm.py` says what a trial does and when it passes.
"""
    REPORT.write_text("\n".join([head, *lines, "", *(f"- {each}" for each in failures)]).rstrip() + "\n" + rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
