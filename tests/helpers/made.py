"""Run directories as tests of the report need them, written without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.lab.intervals import estimate
from fp4train.lab.studies import (
    Finding,
    ForkSettings,
    Judgement,
    Pair,
    RankResult,
    SensitivityResult,
)
from fp4train.lab.studies.results import CandidateResult, ChosenPolicy, StudiedCheckpoint
from fp4train.lab.studies.tradeoff import Point
from fp4train.sealed import seal_line, sealed
from fp4train.track import GRADIENT, OPERAND, STATISTICS, MetricsLog, Statistics, StatisticsLog

LAYERS = ("blocks.0.mlp.up", "blocks.1.mlp.up")


def sealed_lines(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """The lines of a journal, as a run writes them."""
    return b"".join(seal_line(json.dumps(line).encode()) for line in lines)


def write_run(
    run: Path,
    level: float = 3.0,
    *,
    seed: int | None = None,
    steps: int = 40,
    first: int = 1,
    recipe: str = "NVFP4",
    errors: bool = False,
    settings: dict[str, Any] | None = None,
    data: str = "text",
) -> Path:
    """A run with losses `level`; with a seed it has a configuration and a history, too."""
    log = MetricsLog(run / "metrics.jsonl")
    for step in range(first, first + steps):
        log.log(
            step,
            {
                "train/loss": level + 1 / step,
                "train/tokens": 512 * step,
                "perf/tokens_per_s": 1000.0,
                "precision/recipe": recipe,
                **({"val/loss": level} if step % 10 == 0 else {}),
            },
        )
    log.finish()
    if errors:
        write_statistics(run, range(10, steps + 1, 10))
    if seed is not None:
        config = {
            "run": {"name": run.name, "seed": seed},
            "train": {"steps": steps, "batch_size": 4, "seq_len": 128, **(settings or {})},
            "data": {"path": data},
        }
        (run / "config.yaml").write_text(json.dumps(config))
        write_history(run, config, steps, recipe)
    return run


def write_history(
    run: Path, config: dict[str, Any], steps: int, recipe: str, **planned: Any
) -> None:
    """A history of one start; `planned` replaces values of its one stretch."""
    stretch = {
        "start": 0,
        "stop": steps + 10,
        "recipe": recipe,
        "reason": "recipe",
        "kinds": [
            [[512, 64, 32], "E2M1·E2M1", "emulate", "auto"],
            [[512, 64, 32], "BF16·BF16", "torch", "kept"],
        ],
        "layers": {LAYERS[0]: [0, 0, 0], LAYERS[1]: [1, 1, 1]},
        **planned,
    }
    line = {
        "event": "start",
        "step": 0,
        "time": "2026-01-01T00:00:00+00:00",
        "config": config,
        "environment": {
            "host": "here",
            "data": config["data"]["path"],
            "versions": {"torch": "2.13.0"},
        },
        "stretches": [stretch],
    }
    (run / "history.jsonl").write_bytes(sealed_lines([line]))


def write_statistics(
    run: Path, steps: Sequence[int], layers: Sequence[str] = LAYERS, **values: float
) -> None:
    """Two operands per layer. sqnr_db: 20 dB for the first, 1 dB less per layer and operand, less
    at later steps.
    """
    log = StatisticsLog(run / STATISTICS)
    for step in steps:
        operands = np.zeros(2 * len(layers), OPERAND)
        gradients = np.zeros(len(layers), GRADIENT)
        operands["layer"], operands["operand"] = (
            np.repeat(np.arange(len(layers)), 2),
            np.tile([0, 1], len(layers)),
        )
        operands["sqnr_db"] = 20 - np.arange(2 * len(layers)) - step / 10
        operands["underflow"] = 0.02
        operands["kurtosis"] = 4.0
        operands["amax"] = 1.5
        for key, value in values.items():
            operands[key] = value
        gradients["layer"] = np.arange(len(layers))
        gradients["gradient"] = 6.0
        gradients["noise"] = 2.0
        log.log(
            Statistics(
                step=step,
                recipe="NVFP4",
                layers=tuple(layers),
                names=("fprop.x", "wgrad.dy"),
                operands=operands,
                gradients=gradients,
            )
        )
    log.close()


def write_ranking(run: Path, name: str = "mxfp8", runs: Sequence[str] = ("runs/a",)) -> Path:
    """The file of a ranking of bf16 and one other candidate, at a checkpoint of each of `runs`."""
    gap = estimate([0.0019, 0.0021, 0.002])
    reference = CandidateResult(name="bf16", asked=True, same=(), group="a", diverged=(), forks=())
    other = replace(
        reference,
        name=name,
        group="b",
        gap=gap,
        gap_high=gap,
        gaps=(gap.mean,) * len(runs),
        p=0.001,
        verdict="different",
        simultaneous=(0.001, 0.003),
    )
    pair = Pair(
        first="bf16",
        second=name,
        difference=gap,
        p=0.001,
        beyond=1.0,
        simultaneous=(0.001, 0.003),
        verdict="different",
    )
    settings = ForkSettings(steps=24, schedule="linear", lr=0.003, batches=8)
    ranking = RankResult(
        checkpoints=tuple(
            StudiedCheckpoint(run=source, step=30, trained="NVFP4", settings=settings)
            for source in runs
        ),
        units=len(runs),
        reference="bf16",
        forks=6,
        look=1,
        tested=True,
        recorded=2,
        margin=0.0005,
        validation_tokens=1024,
        floor=replace(gap, mean=0.0),
        candidates=(reference, other),
        order=("bf16", name),
        pairs=(pair,),
    )
    return _study(run, "rank-30-ab", "rank.json", ranking)


def write_sensitivity(run: Path, layer: str = "blocks.0.mlp.up", batches: int = 8) -> Path:
    """The file of a sensitivity."""

    def finding(name: str, mean: float) -> Finding:
        errors = estimate([mean - 0.01, mean + 0.01, mean])
        return Finding(
            name=name,
            nmse=errors,
            variance=None,
            bias2=None,
            cosine=errors,
            loss=errors,
        )

    means = {
        "everything": 0.1,
        "nothing": 0.001,
        f"layer/{layer}": 0.08,
        "layer/blocks.1.mlp.up": 0.01,
        "operand/fprop.x": 0.09,
    }
    whole = finding("everything", 0.1)
    judged = Judgement(
        batches=batches,
        chosen=finding("chosen policy", 0.021),
        everything=whole,
        gain=whole.nmse,
        over_own=None,
    )
    point = Point(kept=(), macs=0.0, nmse=0.1)
    chosen = {**vars(point), "macs": 0.5, "nmse": 0.02}
    sensitivity = SensitivityResult(
        run=str(run),
        step=30,
        recipe="NVFP4",
        identity={"run": None},
        batches=batches,
        tokens_per_batch=512,
        signal=None,
        parts={name: finding(name, mean) for name, mean in means.items()},
        shares={},
        blocks={},
        pareto=(point, Point(**chosen)),
        policy=ChosenPolicy(keep=(layer,), measured=judged.chosen, judged=judged, **chosen),
    )
    return _study(run, "sensitivity-nvfp4-30", "sensitivity.json", sensitivity)


def _study(run: Path, folder: str, name: str, result: RankResult | SensitivityResult) -> Path:
    path = run / "studies" / folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(sealed({"identity": {"run": None}, **asdict(result)}))
    return path
