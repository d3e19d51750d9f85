"""rank.json and sensitivity.json: what the commands write, and what figures and reports read of
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4train.files import Folder
from fp4train.lab.analysis.figure import plain
from fp4train.lab.studies.findings import Finding, Judgement
from fp4train.lab.studies.intervals import CONFIDENCE, Estimate
from fp4train.lab.studies.parts import KINDS
from fp4train.lab.studies.sequential import ALPHA, VERDICTS
from fp4train.lab.studies.subject import STUDIES
from fp4train.lab.studies.tradeoff import Point
from fp4train.sealed import identity, unsealed

if TYPE_CHECKING:
    from fp4train.lab.studies.ranking import Entry, Ranking
    from fp4train.lab.studies.sequential import Pair
    from fp4train.lab.studies.summary import SensitivityReport

RANKING = "rank.json"
SENSITIVITY = "sensitivity.json"
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


class SensitivityResult:
    """The findings on one recipe at one step, of what `sensitivity_json` wrote.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: it did not.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        policy = saved["policy"]
        gpu = saved["gpu"]
        self.run = plain(Path(str(saved["run"])).name, NAME)
        self.step = int(saved["step"])
        self.batches = int(saved["batches"])
        self.recipe = plain(saved["recipe"], NAME)
        self.parts = {
            name: _read_finding(plain(name, NAME), finding)
            for name, finding in saved["parts"].items()
        }
        """Findings by name of part."""
        self.curve = [_read_point(point) for point in saved["pareto"]]
        """Points of time and error, from nothing kept to everything that is worth it."""
        self.gpu = None if gpu is None else plain(gpu, NAME)
        """The GPU of its times."""
        self.keep = [plain(pattern, NAME) for pattern in policy["keep"]]
        """The patterns of the policy."""
        self.chosen = _read_point(policy)
        """The point of the policy."""
        self.measured = _read_finding("", policy["measured"]).nmse
        """The policy's nMSE on batches that did not choose it."""
        if (judged := policy["judged"]) is None:
            self.gain = None
        else:
            self.gain = _read_estimate(judged["gain"])
        """nMSE saved against keeping nothing, batch by batch; None if nothing is kept."""

    def of_kind(self, kind: str) -> list[Finding]:
        return [part for part in self.parts.values() if part.kind == kind]


class RankResult:
    """A ranking on one or several checkpoints, of what `rank_json` wrote.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: it did not.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self.body = {key: value for key, value in saved.items() if key != "identity"}
        """Equal for the results of one ranking in the folders of its runs."""
        checkpoints = saved["checkpoints"]
        entries = saved["candidates"]
        units = int(saved["units"])
        settings = checkpoints[0]["settings"]
        reference = str(saved["reference"])
        self.checkpoints = [
            plain(f"{base['run']}, step {int(base['step'])}, trained in {base['trained']}", NAME)
            for base in checkpoints
        ]
        """ "runs/a, step 200", …, with what trained them."""
        self.forks = int(saved["forks"])
        """The forks of each candidate at each checkpoint."""
        self.steps = int(settings["steps"])
        """The steps of a fork."""
        self._count = self.forks * len(checkpoints)
        self._freedom = (units if units > 1 else self._count) - 1
        if settings["schedule"] == "own":
            rate = "own schedule"
        else:
            rate = f"rate {settings['lr']:.3g} → 0"
        origin = f"from step {int(checkpoints[0]['step'])}, {rate}"
        if len(checkpoints) == 1:
            self.where = origin
        else:
            self.where = f"at each of {len(checkpoints)} checkpoints"
        self.reference = plain(reference, NAME)
        self.floor = self.gap(saved["floor"])
        pairs = {frozenset((str(p["first"]), str(p["second"]))): p for p in saved["pairs"]}
        asked = {str(entry["name"]): entry for entry in entries if entry["asked"]}
        names = dict.fromkeys((*map(str, saved["order"]), *asked))
        self.candidates = [
            CandidateResult(self, asked[name], pairs.get(frozenset((name, reference))))
            for name in names
        ]
        """Results of the candidates in their order, diverged ones last."""

    def gap(self, saved: Mapping[str, Any] | None) -> Estimate | None:
        """A gap with the freedom of its base runs."""
        if saved is None:
            return None
        return _read_estimate({**saved, "count": self._count, "freedom": self._freedom})


class CandidateResult:
    """One candidate; gaps in nats per token, None for the reference and for what diverged.

    Args:
        ranking: ranking that it is part of.
        entry: saved values of the candidate.
        pair: saved values of it and the reference; None for the reference itself.
    """

    def __init__(
        self, ranking: RankResult, entry: Mapping[str, Any], pair: Mapping[str, Any] | None
    ) -> None:
        reference = str(ranking.body["reference"])
        tested = pair if ranking.body["tested"] else None
        is_reference = str(entry["name"]) == reference
        gaps: Mapping[str, Any] = {} if is_reference else entry
        self.name = plain(str(entry["name"]), NAME)
        self.gap = ranking.gap(gaps.get("gap"))
        """Gap to the reference's loss, evaluated in the recipe."""
        self.high = ranking.gap(gaps.get("gap_high"))
        """Gap to the reference's loss, evaluated in high precision."""
        if pair and str(pair["first"]) == reference:
            sign = 1
        else:
            sign = -1
        if pair:
            ends = sorted(sign * _number(end) for end in pair["together"] if end is not None)
        else:
            ends = []
        self.simultaneous = (ends[0], ends[1]) if len(ends) == 2 else None
        """The simultaneous interval of the gap and those of all other pairs."""
        self.gaps = [_number(gap) for gap in gaps.get("gaps", ())]
        """The gap at each checkpoint of the forks."""
        self.p = None if tested is None else _number(tested["p"])
        """The p-value of the gap; None for the reference, and before there are enough forks for a
        test.
        """
        self.verdict = str((tested or {"verdict": "reference" * is_reference})["verdict"])
        if tested and self.verdict not in VERDICTS:
            raise ValueError(
                f"its verdict {self.verdict[:NAME]!r} is none of {', '.join(VERDICTS)}"
            )
        self.group = str(entry["group"] or "")
        self.diverged = str(entry["diverged"][0]) if entry["diverged"] else None
        self.spikes = [plain(place, NAME) for place in entry["spikes"]]
        """Places at which forks of it spiked, in words."""


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
                problems.append(
                    f"{run / STUDIES}: the first {MOST} of {len(names)} studies are shown"
                )
            for name in names[:MOST]:
                with studies.folder(name) as folder:
                    try:
                        if folder.has_file(SENSITIVITY):
                            sensitivities.append(
                                SensitivityResult(_parsed(top, folder, SENSITIVITY))
                            )
                        elif folder.has_file(RANKING):
                            rankings.append(RankResult(_parsed(top, folder, RANKING)))
                        else:
                            problems.append(
                                f"{folder.path} has no result: the study is not finished"
                            )
                    except KeyError as error:
                        problems.append(
                            f"{folder.path} cannot be read (it has no {error}): an older "
                            "fp4train made it, or it was "
                            "changed; the same command makes it anew"
                        )
                    except (
                        OSError,
                        ValueError,
                        TypeError,
                        LookupError,
                        AttributeError,
                        ArithmeticError,
                    ) as error:
                        problems.append(
                            f"{folder.path} cannot be read ({type(error).__name__}: {error})"
                        )
                    except RecursionError:
                        problems.append(
                            f"{folder.path} cannot be read: its JSON is nested too deep"
                        )
    return Studies(sensitivities=sensitivities, rankings=rankings)


def _parsed(run: Folder, folder: Folder, name: str) -> dict[str, Any]:
    saved = unsealed(folder.read(name, LIMIT))
    run_identity = identity(run)
    whose = saved["identity"]["run"]
    if run_identity is not None and whose not in (None, run_identity):
        raise ValueError(f"it is of run {whose}, not of this one")
    return saved


def sensitivity_json(report: SensitivityReport) -> dict[str, Any]:
    """Plain values of everything that a sensitivity study found."""
    subject = report.subject
    study = report.sensitivity
    trade = report.trade
    judged = report.judged
    layers = study.parts.layers
    operands = study.parts.operands
    cells = None
    if study.has_cells:
        cells = {
            layer: {operand: study.cell(layer, operand) for operand in operands} for layer in layers
        }
    return {
        "run": subject.title,
        "step": subject.step,
        "recipe": study.parts.recipe.name,
        "identity": subject.identity,
        "confidence": CONFIDENCE,
        "batches": study.batches,
        "tokens_per_batch": subject.run.config.train.tokens,
        "signal": _estimate(study.signal),
        "parts": {name: _finding(finding) for name, finding in study.findings.items()},
        "shares": {KINDS[kind]: _estimate(share) for kind, share in study.shares.items()},
        "blocks": {str(block): damage for block, damage in study.blocks().items()},
        "cells": cells,
        "gpu": None if trade.gpu is None else trade.gpu.name,
        "pareto": [_point(point) for point in trade.curve],
        "policy": {
            **_point(trade.chosen),
            "keep": list(trade.policy.keep),
            "measured": _finding(study.whole if judged is None else judged.chosen),
            "judged": None if judged is None else _judgement(judged),
        },
    }


def _judgement(judged: Judgement) -> dict[str, Any]:
    return {
        "batches": judged.batches,
        "everything": _finding(judged.everything),
        "gain": _estimate(judged.gain),
        "over_the_runs": _estimate(judged.over_own),
    }


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {**asdict(estimate), "interval": estimate.interval()}


def _read_estimate(saved: Mapping[str, Any]) -> Estimate:
    count = int(saved["count"])
    freedom = int(saved["freedom"])
    error = _known(saved["error"])
    if error is not None and not 1 <= freedom <= count < 1 << 31:
        raise ValueError(f"{freedom} degrees of freedom of {count} values")
    return Estimate(mean=_number(saved["mean"]), error=error, count=count, freedom=freedom)


def _finding(finding: Finding) -> dict[str, Any]:
    return {"kind": finding.kind, **{key: _estimate(getattr(finding, key)) for key in MEASURED}}


def _read_finding(name: str, saved: Mapping[str, Any]) -> Finding:
    estimates: dict[str, Any] = dict.fromkeys(MEASURED)
    estimates |= {
        key: _read_estimate(saved[key])
        for key in MEASURED
        if key in NEEDED or saved[key] is not None
    }
    return Finding(
        name=name, kind=str(saved["kind"]), what=name.partition("/")[2] or name, **estimates
    )


def _point(point: Point) -> dict[str, Any]:
    kept = [{"layer": unit.layer, "gemms": list(unit.gemms)} for unit in point.kept]
    return {"kept": kept, "macs": point.macs, "nmse": point.nmse, "time": point.time}


def _read_point(saved: Mapping[str, Any]) -> Point:
    return Point(
        kept=(),
        macs=_number(saved["macs"]),
        nmse=_number(saved["nmse"]),
        time=_known(saved["time"]),
    )


def rank_json(ranking: Ranking) -> dict[str, Any]:
    """Everything that a ranking found, as JSON values; an interval that is not known is null."""
    return {
        "checkpoints": [
            {
                "run": str(base.source),
                "step": base.step,
                "trained": base.trained,
                "settings": asdict(base.settings),
            }
            for base in ranking.bases
        ],
        "units": len(set(ranking.units)),
        "reference": ranking.reference.name,
        "forks": ranking.per_base,
        "look": ranking.look,
        "tested": ranking.tested,
        "recorded": len(ranking.compared_entries),
        "margin": ranking.margin,
        "alpha": ALPHA,
        "validation_tokens": ranking.bases[0].tokens,
        "floor": None if ranking.floor is None else _gap(ranking.floor),
        "candidates": [_candidate(ranking, entry) for entry in ranking.entries],
        "order": [entry.name for entry in ranking.ranked],
        "pairs": [_pair(pair) for pair in ranking.pairs],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    values = {
        "together" if name == "simultaneous" else name: value
        for name, value in asdict(pair).items()
    }
    return {**_gap(pair.difference), **values, "together": list(map(_finite, pair.simultaneous))}


def _candidate(ranking: Ranking, entry: Entry) -> dict[str, Any]:
    gaps: dict[str, Any] = {}
    if not entry.diverged:
        gaps = {"gap": _gap(ranking.gap(entry)), "gap_high": _gap(ranking.gap(entry, "high"))}
        gaps["gaps"] = [gap.mean for gap in ranking.by_base(entry)]
        gaps["tokens"] = ranking.sampling(entry)
    return {
        "name": entry.name,
        "asked": entry.asked,
        "same": list(entry.same),
        "group": ranking.groups.get(entry.name),
        "diverged": entry.diverged,
        "spikes": [ranking.place(spike.fork) for spike in ranking.spikes if spike.entry is entry],
        **gaps,
        "forks": [asdict(fork) for fork in entry.forks if fork is not None],
    }


def _gap(gap: Estimate) -> dict[str, Any]:
    low, high = gap.interval() or (None, None)
    return {
        "mean": gap.mean,
        "error": gap.error,
        "low": low,
        "high": high,
        "t": _finite(gap.t),
    }


def _finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


def _number(value: Any) -> float:
    number = float(value)
    if not abs(number) < LARGEST:
        raise ValueError(f"{value} is no number of a study")
    return number


def _known(value: Any) -> float | None:
    return None if value is None else _number(value)
