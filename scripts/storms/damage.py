"""Damaged records: what is read must equal what was written, or the file is named in a message, or nothing is lost."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from storms.ground import ON, STEPS, TINY, Ground, Result, call, listening, losses

FILES = (
    "config.yaml",
    "metrics.jsonl",
    "history.jsonl",
    "statistics.bin",
    "plan.txt",
    "heartbeat.json",
    "checkpoints/*/state.json",
    "checkpoints/*/tensors.safetensors",
    "checkpoints/*/weights.safetensors",
    "cache/*/*.bin",
    "cache/*/*.json",
)
RANK = "studies/rank/rank.json"
SENSITIVITY = "studies/sensitivity/sensitivity.json"
READ = {
    **{name: name for name in ("config.yaml", "metrics.jsonl", "history.jsonl", "statistics.bin")},
    **{
        name: f"checkpoints/*/{name}"
        for name in ("state.json", "tensors.safetensors", "weights.safetensors")
    },
    "cache.bin": "cache/*/*.bin",
    "cache.json": "cache/*/index.json",
    "rank.json": RANK,
    "sensitivity.json": SENSITIVITY,
    "measurements.jsonl": "studies/rank/measurements.jsonl",
}
"""The records that are checked, by what the table calls them."""
MEASURED_AGAIN = ("measurements.jsonl", "metrics.jsonl")
"""Records whose lines after the last checkpoint may be lost by a kill: a run, or a study, writes
them again.
"""


def damage(path: Path, draw: random.Random, others: Path | None = None) -> str:
    """Change the bytes of a file; returns how. `others`: the file of another run."""
    data = path.read_bytes()
    at = draw.randrange(max(1, len(data)))
    size = draw.randint(1, 4096)
    flipped = bytes(byte ^ 1 << draw.randrange(8) for byte in data[at : at + 1])
    changed = {
        "flip": data[:at] + flipped + data[at + 1 :],
        "cut": data[:at],
        "zeros": data[:at] + bytes(len(data[at : at + size])) + data[at + size :],
        "other": data if others is None else others.read_bytes(),
    }
    how = draw.choice(("flip", "flip", *changed, "gone"))
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(changed[how])
    return how


def read_part(run: Path, kind: str) -> Any:
    """What fp4train reads from the record `kind` of `run`: when it goes on, or when it reports
    about the run.
    """

    from fp4train import checkpoint
    from fp4train.config.schema import plain
    from fp4train.data import cache
    from fp4train.files import Folder
    from fp4train.lab.studies import StudyRecord, read_studies
    from fp4train.run.find import check_source
    from fp4train.run.record import directory, journal
    from fp4train.run.record.trust import check_belongs, lost_records
    from fp4train.track.metrics import mend, read_metrics
    from fp4train.track.statistics import read_statistics

    say = logging.getLogger("fp4train").warning
    if kind in ("cache.bin", "cache.json"):
        (path,) = (run / "cache").iterdir()
        tokens = cache.opened(Folder.open(path), verify=True)
        return None if tokens is None else np.asarray(tokens).tobytes()
    if kind in ("rank.json", "sensitivity.json"):
        problems: list[str] = []
        studies = read_studies(run, problems)
        for problem in problems:
            say(problem)
        # Their contents: a line that stands twice in an object may change nothing of it.
        return studies.rankings, studies.sensitivities
    if kind == "measurements.jsonl":
        study = json.loads((run / READ[kind]).with_suffix(".known").read_text())
        record = StudyRecord(run / READ[kind], study["identity"], study["step"])
        record.close()
        return list(record.known.items())
    start = checkpoint.load(run / "checkpoints")
    check_belongs(start, run, mend=True)
    if kind == "config.yaml":
        return plain(directory.read_config(run)), directory.identity(run)
    if kind in ("history.jsonl", "statistics.bin"):
        check_source(run, directory.read_config(run))
        records = journal.read_journal(run)
        with Folder.open(run) as folder:
            for text in lost_records(folder, start.state, records).values():
                say(text)
        if kind == "history.jsonl":
            return records
        columns = read_statistics(run)
        return [
            {k: v.tolist() for k, v in table.items()}
            for table in (columns.operands, columns.gradients)
        ]
    if kind == "metrics.jsonl":
        for text in mend(run / kind, start.step, start.state.get("metrics")):  # type: ignore[arg-type]
            say(text)
        return read_metrics(run / kind)
    return (
        start.step,
        start.state,
        {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in start.tensors.items()},
    )


def studied(ground: Ground, name: str) -> Path:
    """A run like the base one, with two studies."""
    place = ground.folder / name
    place.mkdir()
    for command in (
        (*TINY, "run.name=a", "train.steps=2", "data.cache_dir=runs/a/cache"),
        ("resume=runs/a", "recipe=mxfp8", "train.steps=4"),
        (
            "rank",
            "runs/a",
            "recipe=bf16,mxfp8",
            "steps=1",
            "forks=2",
            "batches=1",
            "out=runs/a/studies/rank",
        ),
        ("sensitivity", "runs/a", "recipe=mxfp8", "batches=2", "out=runs/a/studies/sensitivity"),
    ):
        code, out = call(place, *command)
        if code:
            raise SystemExit(f"{' '.join(command[:2])} failed: {out}")
    record = place / "runs/a" / READ["measurements.jsonl"]
    record.with_suffix(".known").write_text(record.read_text().splitlines()[0])
    return place / "runs/a"


def _harmless(kind: str, reading: Any, sound: Any, marked: int) -> bool:
    return reading == sound or (
        kind in MEASURED_AGAIN and reading == sound[: len(reading)] and len(reading) >= marked
    )


def damage_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """In this process: the files are read as a resume or a report reads them, which takes
    milliseconds.
    """
    from fp4train import checkpoint
    from fp4train.errors import UserError

    run: Path = ground.once("read", lambda: studied(ground, "read"))
    other: Path = ground.once("other", lambda: studied(ground, "other"))
    os.chdir(run.parents[1])
    readings: dict[str, Any] = ground.once(
        "known", lambda: {kind: read_part(run, kind) for kind in READ}
    )
    kind = draw.choice(tuple(READ))
    path = max(run.glob(READ[kind]))
    there = other / path.relative_to(run)
    good = path.read_bytes()
    if kind.startswith("cache"):  # what reads a damaged entry mends it
        shutil.copytree(path.parent, place / "entry")
    how = damage(path, draw, there if there.exists() else None)
    same = path.exists() and path.read_bytes() == good
    marked = 0
    if kind == "metrics.jsonl":
        metrics: Any = checkpoint.load(run / "checkpoints").state["metrics"]
        marked = good[: metrics["bytes"]].count(b"\n")
    seen = ""
    with listening() as messages:
        try:
            reading = read_part(run, kind)
            named = bool(messages.lines) or (kind.startswith("cache") and reading is None)
            if not (same or named or _harmless(kind, reading, readings[kind], marked)):
                seen = "read in silence"
        except UserError as error:
            seen = "" if len(str(error).splitlines()) == 1 else f"no line: {error}"
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
    for left in run.glob("*.damaged"):
        left.unlink()
    if kind.startswith("cache"):
        shutil.rmtree(path.parent)
        shutil.copytree(place / "entry", path.parent)
    path.write_bytes(good)
    return Result(kind, not seen, f"{how} of {path.name}: {seen}")


def resume_trial(ground: Ground, place: Path, draw: random.Random, number: int) -> Result:
    """The same, and a whole resume."""
    ground.copy(place)
    pattern = draw.choice(FILES)
    path = draw.choice(sorted((place / "runs/a").glob(pattern)))
    how = damage(path, draw)
    code, out = call(place, *ON)
    undisturbed = ground.undisturbed("resume").result["losses"]
    after = losses(place / "runs/a")
    refused = code == 1 and out.count("fp4train: ") == 1 and "Traceback" not in out
    equal = all(after[step] == undisturbed.get(step) for step in after) and STEPS in after
    told = after.keys() == undisturbed.keys() or "left out" in out or "since the checkpoint" in out
    passed = refused or (code == 0 and equal and told)
    seen = f"{how} of {path.name}: exit {code}: {out[-400:]}"
    return Result(pattern.rpartition("/")[2], passed, seen)
