"""rank.json and sensitivity.json: what the commands write, and what figures and reports read of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4train.files import Folder
from fp4train.lab.analysis.figure import plain
from fp4train.lab.studies.findings import Finding
from fp4train.lab.studies.sequential import ALPHA
from fp4train.lab.studies.statistics import CONFIDENCE, Estimate
from fp4train.lab.studies.subject import STUDIES
from fp4train.lab.studies.tradeoff import Point
from fp4train.sealed import identity, unsealed

if TYPE_CHECKING:
    from fp4train.lab.studies.ranking import Entry, Ranking
    from fp4train.lab.studies.summary import SensitivityReport

RANKING, SENSITIVITY = "rank.json", "sensitivity.json"
KINDS = {"gemm": "GEMMs", "operand": "operands", "layer": "layers"}
"""Kinds of parts of a recipe, in the plural."""
VERDICTS = {"apart": "told apart", "here": "told apart here", "alike": "alike", "open": "not told apart"}
MEASURED = ("nmse", "variance", "bias2", "cosine", "loss", "output")
NEEDED = ("nmse", "cosine", "loss")
"""The estimates of a part, and those among them that every part has."""
LIMIT = 1 << 26
"""Bytes of a result that are read."""
MOST = 32
"""Studies of a run that are read."""
LARGEST = 1e100
"""A larger number is none of a study."""
NAME = 300
"""Characters of a name in a study."""


@dataclass(frozen=True, kw_only=True)
class SensitivityResult:
    """The findings on one recipe at one step.

    Args:
        parts: by name. curve: from nothing kept to everything that is worth it. gpu: of its times.
        keep, chosen: the patterns of the policy, and its point. measured: its nMSE on batches that did not choose it.
        gain: nMSE saved against keeping nothing, batch by batch; None if nothing is kept, or in results of before it
            was measured.
    """

    run: str
    step: int
    recipe: str
    batches: int
    parts: Mapping[str, Finding] = field(repr=False)
    curve: Sequence[Point] = field(repr=False)
    gpu: str | None
    keep: Sequence[str]
    chosen: Point
    measured: Estimate
    gain: Estimate | None

    def of_kind(self, kind: str) -> list[Finding]:
        return [part for part in self.parts.values() if part.kind == kind]


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """One candidate; gaps in nats per token, None for the reference and for what diverged.

    Args:
        gap, high: in the recipe and in high precision. together: the interval of the gap with those of all other pairs.
        gaps: at each checkpoint. p: None for the reference, and before there are enough forks for a test.
        spikes: where forks of it spiked.
    """

    name: str
    gap: Estimate | None
    high: Estimate | None
    together: tuple[float, float] | None
    gaps: Sequence[float]
    p: float | None
    verdict: str
    group: str
    diverged: str | None
    spikes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """A ranking on one or several checkpoints; the candidates in their order, diverged ones last.

    Args:
        checkpoints: "runs/a, step 200", …, with what trained them. forks: of each candidate at each of them.
        where: "from step 200, rate 0.003 → 0", "at each of 3 checkpoints".
    """

    checkpoints: Sequence[str]
    forks: int
    steps: int
    where: str
    reference: str
    floor: Estimate | None
    candidates: Sequence[CandidateResult] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Studies:
    """The results of a run, by their folders' names."""

    sensitivities: Sequence[SensitivityResult] = ()
    rankings: Sequence[RankResult] = ()


def read_studies(run: Path, problems: list[str]) -> Studies:
    """The finished studies of a run; one that cannot be read is added to `problems`.

    Raises:
        OSError: the folder of studies cannot be read.
    """
    sensitivities: list[SensitivityResult] = []
    rankings: list[RankResult] = []
    with Folder.open(run) as top:
        if top.status(STUDIES) is None:
            return Studies()
        with top.folder(STUDIES) as studies:
            names = [name for name in studies.names() if studies.has_folder(name)]
            if len(names) > MOST:
                problems.append(f"{run / STUDIES}: the first {MOST} of {len(names)} studies are shown")
            for name in names[:MOST]:
                with studies.folder(name) as folder:
                    try:
                        if folder.has_file(SENSITIVITY):
                            sensitivities.append(read_sensitivity(_parsed(top, folder, SENSITIVITY, problems)))
                        elif folder.has_file(RANKING):
                            rankings.append(read_rank(_parsed(top, folder, RANKING, problems)))
                        else:
                            problems.append(f"{folder.path} has no result: the study is not finished")
                    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
                        problems.append(f"{folder.path} cannot be read ({type(error).__name__}: {error})")
                    except RecursionError:
                        problems.append(f"{folder.path} cannot be read: its JSON is nested too deep")
    return Studies(sensitivities=sensitivities, rankings=rankings)


def _parsed(run: Folder, folder: Folder, name: str, problems: list[str]) -> dict[str, Any]:
    found, checked = unsealed(folder.read(name, LIMIT))
    own, whose = identity(run), (found.get("identity") or {}).get("run")
    if own is not None and whose not in (None, own):
        raise ValueError(f"it is of run {whose}, not of this one")
    if not checked:
        problems.append(f"{folder.path / name} is of an older version and has no checksum: no change would be noticed")
    return found


def sensitivity_json(report: SensitivityReport) -> dict[str, Any]:
    """Plain values of everything that a sensitivity study found."""
    subject, found, trade, judged = report.subject, report.found, report.trade, report.judged
    layers, operands = found.parts.layers, found.parts.operands
    return {
        "run": subject.title,
        "step": subject.step,
        "recipe": found.parts.recipe.name,
        "identity": subject.identity,
        "confidence": CONFIDENCE,
        "batches": found.batches,
        "tokens_per_batch": subject.run.config.train.tokens,
        "signal": _estimate(found.signal),
        "parts": {name: _finding(each) for name, each in found.findings.items()},
        "shares": {KINDS[kind]: _estimate(each) for kind, each in found.shares.items()},
        "blocks": {str(block): damage for block, damage in found.blocks().items()},
        "cells": {layer: {operand: found.cell(layer, operand) for operand in operands} for layer in layers}
        if found.has_cells
        else None,
        "gpu": None if trade.gpu is None else trade.gpu.name,
        "pareto": [_point(each) for each in trade.curve],
        "policy": {
            **_point(trade.chosen),
            "keep": list(trade.policy.keep),
            "measured": _finding(found.whole if judged is None else judged.chosen),
            "judged": None
            if judged is None
            else {
                "batches": judged.batches,
                "everything": _finding(judged.everything),
                "gain": _estimate(judged.gain),
                "over_the_runs": _estimate(judged.over_own),
            },
        },
    }


def _estimate(each: Estimate | None) -> dict[str, Any] | None:
    return None if each is None else {**asdict(each), "interval": each.interval()}


def _read_estimate(each: Mapping[str, Any]) -> Estimate:
    count, freedom, error = int(each["count"]), int(each["freedom"]), _known(each["error"])
    if error is not None and not 1 <= freedom <= count < 1 << 31:
        raise ValueError(f"{freedom} degrees of freedom of {count} values")
    return Estimate(mean=_number(each["mean"]), error=error, count=count, freedom=freedom)


def _finding(each: Finding) -> dict[str, Any]:
    return {"kind": each.kind, **{key: _estimate(getattr(each, key)) for key in MEASURED}}


def _read_finding(name: str, each: Mapping[str, Any]) -> Finding:
    found: Any = {
        key: _read_estimate(each[key]) if key in NEEDED or each.get(key) is not None else None for key in MEASURED
    }
    return Finding(name=name, kind=str(each["kind"]), what=name.partition("/")[2] or name, **found)


def _point(each: Point) -> dict[str, Any]:
    kept = [{"layer": unit.layer, "gemms": list(unit.gemms)} for unit in each.kept]
    return {"kept": kept, "macs": each.macs, "nmse": each.nmse, "time": each.time}


def _read_point(each: Mapping[str, Any]) -> Point:
    return Point(kept=(), macs=_number(each["macs"]), nmse=_number(each["nmse"]), time=_known(each.get("time")))


def read_sensitivity(found: Mapping[str, Any]) -> SensitivityResult:
    """The result that `sensitivity_json` wrote.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: it did not.
    """

    policy, gpu = found["policy"], found.get("gpu")
    judged = policy.get("judged")
    return SensitivityResult(
        run=plain(Path(str(found.get("run", ""))).name, NAME),
        step=int(found["step"]),
        recipe=plain(found["recipe"], NAME),
        batches=int(found["batches"]),
        parts={name: _read_finding(plain(name, NAME), each) for name, each in found["parts"].items()},
        curve=[_read_point(each) for each in found["pareto"]],
        gpu=None if gpu is None else plain(gpu, NAME),
        keep=[plain(each, NAME) for each in policy["keep"]],
        chosen=_read_point(policy),
        measured=_read_finding("", policy["measured"]).nmse,
        gain=None if judged is None else _read_estimate(judged["gain"]),
    )


def rank_json(found: Ranking) -> dict[str, Any]:
    """Everything that a ranking found, as JSON values; an interval that is not known is null."""
    return {
        "checkpoints": [
            {"run": str(base.source), "step": base.step, "trained": base.trained, "settings": asdict(base.settings)}
            for base in found.bases
        ],
        "units": len(set(found.units)),
        "reference": found.reference.name,
        "forks": found.per_base,
        "look": found.look,
        "tested": found.tested,
        "recorded": len(found.compared_entries),
        "margin": found.margin,
        "alpha": ALPHA,
        "validation_tokens": found.bases[0].tokens,
        "floor": None if found.floor is None else _gap(found.floor),
        "candidates": [_candidate(found, entry) for entry in found.entries],
        "order": [entry.name for entry in found.ranked],
        "pairs": [{**_gap(p.difference), **asdict(p), "together": list(map(_finite, p.together))} for p in found.pairs],
    }


def _candidate(found: Ranking, entry: Entry) -> dict[str, Any]:
    gaps: dict[str, Any] = {}
    if not entry.diverged:
        gaps = {"gap": _gap(found.gap(entry)), "gap_high": _gap(found.gap(entry, "high"))}
        gaps |= {"gaps": [at.mean for at in found.by_base(entry)], "tokens": found.sampling(entry)}
    return {
        "name": entry.name,
        "asked": entry.asked,
        "same": list(entry.same),
        "group": found.groups.get(entry.name),
        "diverged": entry.diverged,
        "spikes": [found.place(spike.fork) for spike in found.spikes if spike.entry is entry],
        **gaps,
        "forks": [asdict(fork) for fork in entry.forks if fork is not None],
    }


def _gap(found: Estimate) -> dict[str, Any]:
    low, high = found.interval() or (None, None)
    return {"mean": found.mean, "error": found.error, "low": low, "high": high, "t": _finite(found.t)}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def read_rank(found: Mapping[str, Any]) -> RankResult:
    """The result that `rank_json` wrote.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: it did not, or an earlier version did.
    """
    if "checkpoints" not in found:
        raise ValueError("made by an earlier fp4train: the same `fp4train rank` makes it anew")
    pairs = {frozenset((str(p["first"]), str(p["second"]))): p for p in found["pairs"]}
    entries = {str(each["name"]): each for each in found["candidates"] if each["asked"]}
    order = [str(name) for name in found["order"]]
    reference, floor, checkpoints = str(found["reference"]), found["floor"], found["checkpoints"]

    count = int(found["forks"]) * len(checkpoints)
    freedom = (int(found["units"]) if int(found["units"]) > 1 else count) - 1

    def gap(each: Mapping[str, Any] | None) -> Estimate | None:
        return None if each is None else _read_estimate({**each, "count": count, "freedom": freedom})

    def candidate(name: str) -> CandidateResult:
        entry = entries[name]
        of = {} if name == reference else entry
        pair = pairs.get(frozenset((name, reference)))
        sign = 1 if pair and str(pair["first"]) == reference else -1
        ends = sorted(sign * _number(each) for each in pair["together"] if each is not None) if pair else []
        tested = pair if found["tested"] else None
        return CandidateResult(
            name=plain(name, NAME),
            gap=gap(of.get("gap")),
            high=gap(of.get("gap_high")),
            together=(ends[0], ends[1]) if len(ends) == 2 else None,
            gaps=[_number(each) for each in of.get("gaps", ())],
            p=None if tested is None else _number(tested["p"]),
            verdict="reference" if name == reference else "" if tested is None else str(tested["verdict"]),
            group=str(entry.get("group") or ""),
            diverged=str(entry["diverged"][0]) if entry["diverged"] else None,
            spikes=[plain(each, NAME) for each in entry["spikes"]],
        )

    first, settings = checkpoints[0], checkpoints[0]["settings"]
    rate = f"rate {settings.get('lr', math.nan):.3g} → 0" if settings.get("schedule") != "own" else "own schedule"
    where = f"from step {int(first['step'])}, {rate}"
    return RankResult(
        checkpoints=[
            plain(f"{each['run']}, step {int(each['step'])}, trained in {each['trained']}", NAME)
            for each in checkpoints
        ],
        forks=int(found["forks"]),
        steps=int(settings["steps"]),
        where=where if len(checkpoints) == 1 else f"at each of {len(checkpoints)} checkpoints",
        reference=plain(reference, NAME),
        floor=gap(floor),
        candidates=[candidate(name) for name in (*order, *(each for each in entries if each not in order))],
    )


def _number(value: Any) -> float:
    found = float(value)
    if not abs(found) < LARGEST:
        raise ValueError(f"{value} is no number of a study")
    return found


def _known(value: Any) -> float | None:
    return None if value is None else _number(value)
