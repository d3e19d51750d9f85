"""Run directories as tests of the report need them, written without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp4train.lab.studies import quantile
from fp4train.sealed import Chain, sealed
from fp4train.track import GRADIENT, OPERAND, STATISTICS, MetricsLog, Statistics, StatisticsLog

LAYERS = ("blocks.0.mlp.up", "blocks.1.mlp.up")
SETTINGS = {"steps": 24, "schedule": "linear", "lr": 0.003, "batches": 8}
"""Of the forks of a ranking."""


def chained(lines: Iterable[Mapping[str, Any]]) -> bytes:
    """The lines of a journal, as a run writes them."""
    chain = Chain("")
    return b"".join(chain.seal(json.dumps(line).encode()) for line in lines)


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
    (run / "history.jsonl").write_bytes(chained([line]))


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


def write_ranking(
    run: Path, name: str = "mxfp8", runs: Sequence[str] = ("runs/a",), spikes: Sequence[str] = ()
) -> Path:
    """A ranking in the form of rank.json, of bf16 and one other candidate, at a checkpoint of each
    of `runs`.
    """
    error = 0.0002 / quantile(0.95, len(runs) - 1 if len(runs) > 1 else 5)
    gap = {"mean": 0.002, "error": error, "low": 0.0018, "high": 0.0022, "t": 20.0}
    forks: list[Any] = []
    shared = {"asked": True, "same": [], "diverged": [], "spikes": [], "forks": forks}
    found = {
        "checkpoints": [
            {"run": a, "step": 30, "trained": "NVFP4", "settings": SETTINGS} for a in runs
        ],
        "reference": "bf16",
        "forks": 6,
        "units": len(runs),
        "tested": True,
        "floor": {**gap, "mean": 0.0, "error": 1.5 * error, "low": -0.0003, "high": 0.0003},
        "candidates": [
            {"name": "bf16", "group": "a", **shared, "gap": gap, "gap_high": gap},
            {
                "name": name,
                "group": "b",
                **shared,
                "gap": gap,
                "gap_high": gap,
                "spikes": list(spikes),
            },
        ],
        "order": ["bf16", name],
        "pairs": [
            {
                "first": "bf16",
                "second": name,
                **gap,
                "p": 0.001,
                "together": [0.001, 0.003],
                "verdict": "different",
            }
        ],
    }
    return _study(run, "rank-30-ab", "rank.json", found)


def write_sensitivity(run: Path, layer: str = "blocks.0.mlp.up") -> Path:
    """A sensitivity in the form of sensitivity.json."""

    def part(kind: str, mean: float) -> dict[str, Any]:
        nmse = {
            "mean": mean,
            "error": 0.01,
            "count": 8,
            "freedom": 7,
            "interval": [mean - 0.02, mean + 0.02],
        }
        other = {key: None for key in ("variance", "bias2", "output")}
        return {
            "kind": kind,
            "nmse": nmse,
            **other,
            "cosine": nmse,
            "loss": {**nmse, "mean": 0.001},
        }

    found = {
        "run": str(run),
        "step": 30,
        "recipe": "NVFP4",
        "batches": 8,
        "gpu": None,
        "parts": {
            "everything": part("everything", 0.1),
            "nothing": part("nothing", 0.001),
            f"layer/{layer}": part("layer", 0.08),
            "layer/blocks.1.mlp.up": part("layer", 0.01),
            "operand/fprop.x": part("operand", 0.09),
        },
        "pareto": [
            {"macs": 0.0, "nmse": 0.1, "time": None},
            {"macs": 0.5, "nmse": 0.02, "time": None},
        ],
        "policy": {
            "macs": 0.5,
            "nmse": 0.02,
            "time": None,
            "keep": [layer],
            "measured": part("chosen policy", 0.021),
            "judged": {"gain": part("", 0.08)["nmse"]},
        },
    }
    return _study(run, "sensitivity-nvfp4-30", "sensitivity.json", found)


def _study(run: Path, folder: str, name: str, found: dict[str, Any]) -> Path:
    path = run / "studies" / folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(sealed({"identity": {"run": None}, **found}))
    return path
