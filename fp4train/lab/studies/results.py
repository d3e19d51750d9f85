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
from fp4train.lab.studies.findings import Finding
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

    def __init__(self, found: Mapping[str, Any]) -> None:
        policy = found["policy"]
        gpu = found["gpu"]
        self.run = plain(Path(str(found["run"])).name, NAME)
        self.step, self.batches = int(found["step"]), int(found["batches"])
        self.recipe = plain(found["recipe"], NAME)
        self.parts = {
            name: _read_finding(plain(name, NAME), each) for name, each in found["parts"].items()
        }
        """Findings by name of part."""
        self.curve = [_read_point(each) for each in found["pareto"]]
        """Points of time and error, from nothing kept to everything that is worth it."""
        self.gpu = None if gpu is None else plain(gpu, NAME)
        """The GPU of its times."""
        self.keep, self.chosen = [plain(each, NAME) for each in policy["keep"]], _read_point(policy)
        """The patterns of the policy, and its point."""
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

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.body = {key: value for key, value in found.items() if key != "identity"}
        """Equal for the results of one ranking in the folders of its runs."""
        checkpoints = found["checkpoints"]
        entries = found["candidates"]
        units = int(found["units"])
        settings = checkpoints[0]["settings"]
        of = str(found["reference"])
        self.checkpoints = [
            plain(f"{each['run']}, step {int(each['step'])}, trained in {each['trained']}", NAME)
            for each in checkpoints
        ]
        """ "runs/a, step 200", …, with what trained them."""
        self.forks, self.steps = int(found["forks"]), int(settings["steps"])
        """The forks of each candidate at each checkpoint, and their steps."""
        self._count = self.forks * len(checkpoints)
        self._freedom = (units if units > 1 else self._count) - 1
        if settings["schedule"] == "own":
            rate = "own schedule"
        else:
            rate = f"rate {settings['lr']:.3g} → 0"
        one = f"from step {int(checkpoints[0]['step'])}, {rate}"
        if len(checkpoints) == 1:
            self.where = one
        else:
            self.where = f"at each of {len(checkpoints)} checkpoints"
        self.reference, self.floor = plain(of, NAME), self.gap(found["floor"])
        pairs = {frozenset((str(p["first"]), str(p["second"]))): p for p in found["pairs"]}
        asked = {str(each["name"]): each for each in entries if each["asked"]}
        names = dict.fromkeys((*map(str, found["order"]), *asked))
        self.candidates = [
            CandidateResult(self, asked[name], pairs.get(frozenset((name, of)))) for name in names
        ]
        """Results of the candidates in their order, diverged ones last."""

    def gap(self, each: Mapping[str, Any] | None) -> Estimate | None:
        """A gap with the freedom of its base runs."""
        if each is None:
            return None
        return _read_estimate({**each, "count": self._count, "freedom": self._freedom})


class CandidateResult:
    """One candidate; gaps in nats per token, None for the reference and for what diverged.

    Args:
        ranking: of it. entry: the candidate. pair: of it and the reference; None for the reference
            itself.
    """

    def __init__(
        self, ranking: RankResult, entry: Mapping[str, Any], pair: Mapping[str, Any] | None
    ) -> None:
        reference = str(ranking.body["reference"])
        tested = pair if ranking.body["tested"] else None
        is_reference = str(entry["name"]) == reference
        of: Mapping[str, Any] = {} if is_reference else entry
        self.name = plain(str(entry["name"]), NAME)
        self.gap, self.high = ranking.gap(of.get("gap")), ranking.gap(of.get("gap_high"))
        """Gaps to the reference's loss, evaluated in the recipe and in high precision."""
        if pair and str(pair["first"]) == reference:
            sign = 1
        else:
            sign = -1
        if pair:
            ends = sorted(sign * _number(each) for each in pair["together"] if each is not None)
        else:
            ends = []
        self.simultaneous = (ends[0], ends[1]) if len(ends) == 2 else None
        """The simultaneous interval of the gap and those of all other pairs."""
        self.gaps = [_number(each) for each in of.get("gaps", ())]
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
        self.spikes = [plain(each, NAME) for each in entry["spikes"]]
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
    found = unsealed(folder.read(name, LIMIT))
    own = identity(run)
    whose = found["identity"]["run"]
    if own is not None and whose not in (None, own):
        raise ValueError(f"it is of run {whose}, not of this one")
    return found


def sensitivity_json(report: SensitivityReport) -> dict[str, Any]:
    """Plain values of everything that a sensitivity study found."""
    subject = report.subject
    found = report.found
    trade = report.trade
    judged = report.judged
    layers = found.parts.layers
    operands = found.parts.operands
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
        "cells": {
            layer: {operand: found.cell(layer, operand) for operand in operands} for layer in layers
        }
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
    if each is None:
        return None
    return {**asdict(each), "interval": each.interval()}


def _read_estimate(each: Mapping[str, Any]) -> Estimate:
    count = int(each["count"])
    freedom = int(each["freedom"])
    error = _known(each["error"])
    if error is not None and not 1 <= freedom <= count < 1 << 31:
        raise ValueError(f"{freedom} degrees of freedom of {count} values")
    return Estimate(mean=_number(each["mean"]), error=error, count=count, freedom=freedom)


def _finding(each: Finding) -> dict[str, Any]:
    return {"kind": each.kind, **{key: _estimate(getattr(each, key)) for key in MEASURED}}


def _read_finding(name: str, each: Mapping[str, Any]) -> Finding:
    found: Any = {
        key: _read_estimate(each[key]) if key in NEEDED or each[key] is not None else None
        for key in MEASURED
    }
    return Finding(name=name, kind=str(each["kind"]), what=name.partition("/")[2] or name, **found)


def _point(each: Point) -> dict[str, Any]:
    kept = [{"layer": unit.layer, "gemms": list(unit.gemms)} for unit in each.kept]
    return {"kept": kept, "macs": each.macs, "nmse": each.nmse, "time": each.time}


def _read_point(each: Mapping[str, Any]) -> Point:
    return Point(
        kept=(), macs=_number(each["macs"]), nmse=_number(each["nmse"]), time=_known(each["time"])
    )


def rank_json(found: Ranking) -> dict[str, Any]:
    """Everything that a ranking found, as JSON values; an interval that is not known is null."""
    return {
        "checkpoints": [
            {
                "run": str(base.source),
                "step": base.step,
                "trained": base.trained,
                "settings": asdict(base.settings),
            }
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
        "pairs": [_pair(pair) for pair in found.pairs],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    values = {
        "together" if name == "simultaneous" else name: each for name, each in asdict(pair).items()
    }
    return {**_gap(pair.difference), **values, "together": list(map(_finite, pair.simultaneous))}


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
    return {
        "mean": found.mean,
        "error": found.error,
        "low": low,
        "high": high,
        "t": _finite(found.t),
    }


def _finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return value


def _number(value: Any) -> float:
    found = float(value)
    if not abs(found) < LARGEST:
        raise ValueError(f"{value} is no number of a study")
    return found


def _known(value: Any) -> float | None:
    return None if value is None else _number(value)
