"""Storms of faults against real runs: kills, damaged bytes, hostile directories, bad input. Seeded and counted.

    python scripts/storm.py                     # a few minutes on two cores
    python scripts/storm.py kills=500 damages=10000 hostile=200 inputs=300 jobs=8 seed=1

| storm | one trial | passes when |
|---|---|---|
| kills | a run is killed (SIGKILL) once to three times at random moments, each time resumed | its losses equal an \
undisturbed run's in every bit |
| damages | one random change of bytes (flip, cut, zeros, removal) in one file of a run, then a resume | it ends as an \
undisturbed run does in every bit, with a warning where the file counts; or refuses in one line |
| hostile | links, pipes, folders or huge files among a run's files, then a resume, an overwrite, a swap | nothing \
outside of the run changes, nothing hangs, no traceback |
| inputs | a command line with a bad value | it ends with one line and exit code 1, and nothing is written |

Says on standard error how far it is, and which trial failed; prints a table at the end. The exit code is 1 if a trial
failed. `part=true` prints the results as one line of JSON instead, for the process that started several parts.
"""

from __future__ import annotations

import contextlib
import io
import json
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 300.0
STEPS = 12
TINY = (
    *("model.width=32", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.hidden=64", "data=text"),
    *("train.batch_size=4", "train.seq_len=32", "eval.batches=1", "eval.every=0", "track=jsonl", "phases=none"),
    *("schedule=constant", "schedule.warmup=0", "checkpoint.every=2", f"train.steps={STEPS}"),
)
FILES = (
    *("config.yaml", "metrics.jsonl", "swaps.json", "plan.txt", "heartbeat.json"),
    *("checkpoints/*/state.json", "checkpoints/*/tensors.safetensors", "cache/*.bin", "cache/*.json"),
)


@dataclass(frozen=True)
class Result:
    """Of one trial: what was done, whether it went as it should, and what was seen otherwise."""

    kind: str
    passed: bool
    seen: str = ""


@dataclass
class Ground:
    """Where storms take place: a text, and a finished run that the trials copy."""

    folder: Path
    losses: dict[int, float]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "fp4train", *arguments]

    def call(self, place: Path, *arguments: str, seconds: float = PATIENCE) -> tuple[int, str]:
        """Exit code and all output; -1 for what hangs. In a process of its own."""
        with subprocess.Popen(self.command(*arguments), **_options(place)) as process:
            try:
                out, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return -1, "hangs"
        return process.returncode, out


def _options(place: Path) -> dict[str, Any]:
    return {
        "cwd": place,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
        "env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    }


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
    ground = Ground(folder, {})
    base = folder / "base"
    base.mkdir()
    for arguments in (
        (*TINY, "run.name=a", "train.steps=4", "data.path=../text.txt", "data.cache_dir=runs/a/cache"),
        ("resume=runs/a", "recipe=mxfp8", "train.steps=8"),
    ):
        code, out = ground.call(base, *arguments)
        if code:
            raise SystemExit(f"the base run failed: {out}")
    shutil.copytree(base, folder / "whole")
    code, out = ground.call(folder / "whole", "resume=runs/a", f"train.steps={STEPS}")
    if code:
        raise SystemExit(f"the whole run failed: {out}")
    ground.losses = losses(folder / "whole/runs/a")
    return ground


def kill_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    shutil.copytree(ground.folder / "base", place, dirs_exist_ok=True)
    kills = draw.randint(1, 3)
    for _ in range(kills):
        with subprocess.Popen(ground.command("resume=runs/a", f"train.steps={STEPS}"), **_options(place)) as process:
            began = time.monotonic()
            log = place / "runs/a/heartbeat.json"
            before = log.stat().st_mtime_ns if log.exists() else 0
            metrics = place / "runs/a/metrics.jsonl"
            size = metrics.stat().st_size
            while process.poll() is None and time.monotonic() - began < PATIENCE:
                if metrics.stat().st_size != size or (log.exists() and log.stat().st_mtime_ns != before):
                    break
                time.sleep(0.002)
            time.sleep(draw.random() * 0.3)
            process.send_signal(signal.SIGKILL)
            process.communicate()
    code, out = ground.call(place, "resume=runs/a", f"train.steps={STEPS}")
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


def damage_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    shutil.copytree(ground.folder / "base", place, dirs_exist_ok=True)
    pattern = draw.choice(FILES)
    path = draw.choice(sorted((place / "runs/a").glob(pattern)))
    good = path.read_bytes()
    kind = pattern.rpartition("/")[2]
    how = damage(path, draw)
    code, out = call_here(place, "resume=runs/a", f"train.steps={STEPS}")
    found = losses(place / "runs/a") if (place / "runs/a/metrics.jsonl").exists() else {}
    refused = code == 1 and out.count("fp4train: ") == 1 and "Traceback" not in out
    as_it_should = {s: v for s, v in ground.losses.items() if s in found} == found and STEPS in found
    told = set(found) == set(ground.losses) or "left out" in out or "missing" in out
    unchanged = kind == "metrics.jsonl" and code == 0 and ("changed" in out or "left out" in out or "cut off" in out)
    passed = refused or (code == 0 and ((as_it_should and told) or unchanged))
    harmless = path.exists() and path.read_bytes() == good
    return Result(kind, passed, "" if passed or harmless else f"{how} of {path.name}: exit {code}: {out[-300:]}")


def hostile_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    shutil.copytree(ground.folder / "base", place, dirs_exist_ok=True)
    outside = place / "outside"
    (outside / "step_00000003").mkdir(parents=True)
    (outside / "step_00000003/state.json").write_text("precious")
    (outside / "file").write_text('{"step": 0}\n')
    run = place / "runs/a"
    name = draw.choice(
        (
            *(".lock", "metrics.jsonl", "config.yaml", "swaps.json", "plan.txt", "curves.png", "heartbeat.json"),
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
    code, out = ground.call(place, *act, seconds=120)
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


def input_trial(ground: Ground, place: Path, draw: random.Random) -> Result:
    place.mkdir(exist_ok=True)
    key, value = draw.choice(KEYS), draw.choice(VALUES)
    arguments = [a for a in (*TINY, "run.name=a", "data.path=../text.txt", "data.cache_dir=cache", "train.steps=1")]
    code, out = call_here(place, *[a for a in arguments if a.partition("=")[0] != key], f"{key}={value}")
    passed = code in (0, 1) and "Traceback" not in out and (code == 0 or out.count("fp4train: ") == 1)
    return Result(key, passed, "" if passed else f"{key}={value}: exit {code}: {out[-300:]}")


def call_here(place: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and all output, in a fork of this process, which has imported everything: a trial in half a second."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(read)
            os.dup2(write, 1)
            os.dup2(write, 2)
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
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        out = pipe.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out


STORMS: dict[str, tuple[Callable[[Ground, Path, random.Random], Result], int]] = {
    "kills": (kill_trial, 20),
    "damages": (damage_trial, 100),
    "hostile": (hostile_trial, 30),
    "inputs": (input_trial, 60),
}
FORKS = ("damages", "inputs")


def storm(name: str, trials: int, ground: Ground, seed: int) -> list[Result]:
    """All trials of one storm, one after another."""
    act, results = STORMS[name][0], []
    for number in range(trials):
        place = ground.folder / f"{name}_{seed}_{number}"
        place.mkdir()
        result = act(ground, place, random.Random(f"{seed} {name} {number}"))
        results.append(result)
        shutil.rmtree(place, ignore_errors=True)
        if not result.passed or (number + 1) % 10 == 0 or number + 1 == trials:
            failed = sum(not each.passed for each in results)
            last = "" if result.passed else f"; {result.kind}: {result.seen}"
            print(f"{name}, seed {seed}: {number + 1} of {trials}, {failed} failed{last}", file=sys.stderr, flush=True)
    return results


def main(arguments: list[str]) -> int:
    """Run the storms, each in `jobs` parts at once; print the table."""
    given = dict(a.partition("=")[::2] for a in arguments)
    known = (*STORMS, "jobs", "seed", "part")
    if strange := set(given) - set(known):
        print(f"unknown: {', '.join(sorted(strange))}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    jobs, seed = int(given.get("jobs", "1")), int(given.get("seed", "0"))
    if jobs > 1:
        return _parallel(given, jobs, seed)
    import torch

    import fp4train.cli
    import fp4train.run.build
    import fp4train.train  # noqa: F401 - forks of this process then start at once

    torch.set_num_threads(1)
    results: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ground = prepare(Path(folder))
        for name, (_, usual) in STORMS.items():
            if trials := int(given.get(name, str(usual))):
                results[name] = storm(name, trials, ground, seed)
    rows = [(name, r.kind, r.passed, r.seen) for name, each in results.items() for r in each]
    if given.get("part") == "true":
        print("RESULTS " + json.dumps(rows))
        return 0
    return _table(rows)


def _parallel(given: dict[str, str], jobs: int, seed: int) -> int:
    def part(number: int) -> str:
        share = {n: int(given.get(n, str(usual))) for n, (_, usual) in STORMS.items()}
        mine = [f"{n}={count // jobs + (number < count % jobs)}" for n, count in share.items()]
        command = [sys.executable, __file__, *mine, f"seed={seed * 1000 + number}", "part=true"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout

    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(part, range(jobs)))
    lines = [line for text in parts for line in text.splitlines() if line.startswith("RESULTS ")]
    return _table([tuple(row) for line in lines for row in json.loads(line.removeprefix("RESULTS "))])


def _table(rows: list[tuple[Any, ...]]) -> int:
    trials, failed = Counter((name, kind) for name, kind, *_ in rows), Counter((n, k) for n, k, ok, _ in rows if not ok)
    print("| storm | of | trials | passed | failed |\n|---|---|---|---|---|")
    for (name, kind), count in sorted(trials.items()):
        print(f"| {name} | {kind} | {count} | {count - failed[name, kind]} | {failed[name, kind]} |")
    for name, kind, passed, seen in rows:
        if not passed:
            print(f"\n{name} ({kind}): {seen}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
