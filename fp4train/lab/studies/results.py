"""rank.json, sensitivity.json and gate.json: what the commands write, and what figures and reports read of
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4train.config.binding import MISSING_KEY
from fp4train.errors import UserError, in_words
from fp4train.files import Folder
from fp4train.lab.studies.findings import Finding, Judgement
from fp4train.lab.studies.intervals import CONFIDENCE, Estimate
from fp4train.lab.studies.parts import KINDS
from fp4train.lab.studies.sequential import ALPHA
from fp4train.lab.studies.stored import (
    StoredBase,
    StoredCandidate,
    StoredGap,
    StoredGateBase,
    StoredPair,
    StoredPoint,
    StoredPolicy,
    StoredStudy,
    bound,
)
from fp4train.lab.studies.subject import STUDIES
from fp4train.lab.studies.tradeoff import Point
from fp4train.sealed import identity, unsealed
from fp4train.text import shortened

if TYPE_CHECKING:
    from fp4train.lab.studies.ranking import Entry, Ranking
    from fp4train.lab.studies.sequential import Pair
    from fp4train.lab.studies.summary import SensitivityReport

RANKING = "rank.json"
SENSITIVITY = "sensitivity.json"
GATE = "gate.json"
MEASURED = ("nmse", "variance", "bias2", "cosine", "loss", "output")
"""The estimates of a part."""
LIMIT = 1 << 26
"""Bytes of a result that are read."""
MOST = 32
"""Studies of a run that are read."""
REASON = 300
"""Characters of the reason why a result cannot be read."""


@dataclass(frozen=True, kw_only=True)
class SensitivityResult:
    """The findings on one recipe at one step, of what `sensitivity_json` wrote.

    Args:
        parts: measurements by name of part.
        gpu: GPU of the times.
        pareto: points of time and error, from nothing kept to everything that is worth it.
        policy: the point that was chosen.
    """

    run: str
    step: int
    batches: int
    recipe: str
    parts: Mapping[str, Finding]
    gpu: str | None
    pareto: tuple[StoredPoint, ...]
    policy: StoredPolicy

    @property
    def name(self) -> str:
        """Name of the run."""
        return Path(self.run).name

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """Findings by name of part."""
        return {name: replace(part, name=name) for name, part in self.parts.items()}

    @property
    def gain(self) -> Estimate | None:
        """nMSE that the policy saves against keeping nothing; None if nothing is kept."""
        return None if self.policy.judged is None else self.policy.judged.gain

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings.values() if finding.kind == kind]


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """One candidate; gaps in nats per token, None for the reference and for what diverged.

    Args:
        gap, high: gap to the reference's loss, evaluated in the recipe and in high precision.
        simultaneous: the interval of the gap that holds together with those of all other pairs.
        gaps: the gap at each checkpoint of the forks.
        p: p-value of the gap; None for the reference, and before there are enough forks for a test.
        verdict: key of `VERDICTS`, or "reference"; "" without a test.
        diverged: problem that ended its forks; None: none did.
        spikes: places at which forks of it spiked, in words.
    """

    name: str
    gap: Estimate | None
    high: Estimate | None
    simultaneous: tuple[float, float] | None
    gaps: tuple[float, ...]
    p: float | None
    verdict: str
    group: str
    diverged: str | None
    spikes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """A ranking on one or several checkpoints, of what `rank_json` wrote. That of several runs is
    equal in the folder of each.

    Args:
        checkpoints: checkpoints that forks begin from.
        units: independent runs among those of the checkpoints.
        forks: forks of each candidate at each checkpoint.
        tested: there were enough forks for a test.
        floor: FP32 − BF16.
        order: names of the candidates that were ranked, the best first.
    """

    checkpoints: tuple[StoredBase, ...]
    units: int
    reference: str
    forks: int
    tested: bool
    floor: StoredGap | None
    candidates: tuple[StoredCandidate, ...]
    order: tuple[str, ...]
    pairs: tuple[StoredPair, ...]

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise ValueError("it has no checkpoints")
        unknown = [name for name in self.order if name not in self._asked]
        if unknown:
            raise ValueError(f"its order has {unknown[0]!r}, which is no candidate of it")
        _ = self.results, self.noise  # refused where an interval of them does not exist

    @property
    def steps(self) -> int:
        """The steps of a fork."""
        return self.checkpoints[0].settings.steps

    @property
    def where(self) -> str:
        """From where forks are trained, and at which rate, in words."""
        if len(self.checkpoints) > 1:
            return f"at each of {len(self.checkpoints)} checkpoints"
        (base,) = self.checkpoints
        if base.settings.schedule == "own":
            rate = "own schedule"
        else:
            rate = f"rate {base.settings.lr:.3g} → 0"
        return f"from step {base.step}, {rate}"

    @property
    def noise(self) -> Estimate | None:
        """The floor with its interval: what rounding alone does."""
        return self._estimate(self.floor)

    @cached_property
    def results(self) -> list[CandidateResult]:
        """Results of the candidates that were asked for, in their order, diverged ones last."""
        names = dict.fromkeys((*self.order, *self._asked))
        return [self._result(self._asked[name]) for name in names]

    @property
    def _asked(self) -> dict[str, StoredCandidate]:
        """The candidates that the command named."""
        return {candidate.name: candidate for candidate in self.candidates if candidate.asked}

    def _result(self, candidate: StoredCandidate) -> CandidateResult:
        is_reference = candidate.name == self.reference
        names = {candidate.name, self.reference}
        pair = next((pair for pair in self.pairs if {pair.first, pair.second} == names), None)
        verdict = "reference" if is_reference else ""
        if pair is not None and self.tested:
            verdict = pair.verdict
        return CandidateResult(
            name=candidate.name,
            gap=None if is_reference else self._estimate(candidate.gap),
            high=None if is_reference else self._estimate(candidate.gap_high),
            simultaneous=None if pair is None else pair.interval(self.reference),
            gaps=() if is_reference else candidate.gaps,
            p=pair.p if pair is not None and self.tested else None,
            verdict=verdict,
            group=candidate.group or "",
            diverged=candidate.diverged[0] if candidate.diverged else None,
            spikes=candidate.spikes,
        )

    def _estimate(self, gap: StoredGap | None) -> Estimate | None:
        """A gap with the freedom of its base runs."""
        if gap is None:
            return None
        count = self.forks * len(self.checkpoints)
        freedom = (self.units if self.units > 1 else count) - 1
        return Estimate(mean=gap.mean, error=gap.error, count=count, freedom=freedom)


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """The answer of a gate, of what `gate_json` wrote. That on several runs is equal in the folder
    of each.

    Args:
        recipe: name of the recipe that was tested.
        against: name of the reference.
        margin: nats per token.
        pairs: pairs of forks at each checkpoint.
        gap: mean difference in nats per token; None: there is none, or a fork diverged.
        interval: ends of the interval of the gap at the verdict's confidence.
    """

    recipe: str
    against: str
    margin: float
    verdict: str
    pairs: int
    gap: float | None
    interval: tuple[float | None, ...]
    checkpoints: tuple[StoredGateBase, ...]


_RESULTS: Mapping[str, type] = {
    SENSITIVITY: SensitivityResult,
    RANKING: RankResult,
    GATE: GateResult,
}


@dataclass(frozen=True, kw_only=True)
class Studies:
    """The results of a run, by their folders' names."""

    sensitivities: Sequence[SensitivityResult] = ()
    rankings: Sequence[RankResult] = ()
    gates: Sequence[GateResult] = ()


def read_studies(run: Path, problems: list[str]) -> Studies:
    """The finished studies of a run; one that cannot be read is added to `problems`.

    Raises:
        OSError: the folder of studies cannot be read.
    """
    results: dict[str, list[Any]] = {file: [] for file in _RESULTS}
    with Folder.open(run) as top:
        if top.status(STUDIES) is None:
            return Studies()
        with top.folder(STUDIES) as studies:
            names = [name for name in studies.names() if not studies.has_file(name)]
            if len(names) > MOST:
                problems.append(
                    f"{run / STUDIES}: the first {MOST} of {len(names)} studies are shown"
                )
            for name in names[:MOST]:
                path = run / STUDIES / name
                try:
                    with studies.folder(name) as folder:
                        file = next((file for file in _RESULTS if folder.status(file)), None)
                        if file is None:
                            problems.append(f"{path} has no result: the study is not finished")
                            continue
                        results[file].append(bound(_parsed(top, folder, file), _RESULTS[file]))
                except (OSError, ValueError, UserError, RecursionError) as error:
                    problems.append(f"{path} cannot be read{_why(error)}")
    sensitivities, rankings, gates = results.values()
    return Studies(sensitivities=sensitivities, rankings=rankings, gates=gates)


def _why(error: Exception) -> str:
    """Why a result cannot be read, as the end of a sentence."""
    if isinstance(error, RecursionError):
        return ": its JSON is nested too deep"
    if isinstance(error, OSError):
        return f" ({in_words(error)})"
    if not isinstance(error, UserError):
        return f" ({type(error).__name__}: {error})"
    key = str(error).removesuffix(MISSING_KEY)
    if key != str(error):
        return (
            f" (it has no {key!r}): another version of fp4train wrote it, or it was changed; the "
            "same command writes it anew"
        )
    return f" ({shortened(str(error), REASON)})"


def _parsed(run: Folder, folder: Folder, name: str) -> dict[str, Any]:
    saved = unsealed(folder.read(name, LIMIT))
    run_identity = identity(run)
    whose = bound(saved, StoredStudy).identity.run
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


def _finding(finding: Finding) -> dict[str, Any]:
    return {"kind": finding.kind, **{key: _estimate(getattr(finding, key)) for key in MEASURED}}


def _point(point: Point) -> dict[str, Any]:
    kept = [{"layer": unit.layer, "gemms": list(unit.gemms)} for unit in point.kept]
    return {"kept": kept, "macs": point.macs, "nmse": point.nmse, "time": point.time}


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
        "validation_tokens": sum(ranking.bases[0].targets),
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
