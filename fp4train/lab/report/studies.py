"""RUN/studies: what `fp4train sensitivity` and `fp4train rank` found on the run, read from their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4train.files import Folder
from fp4train.lab.report.html import plain
from fp4train.sealed import identity, unsealed

STUDIES = "studies"
LIMIT = 1 << 26
"""Bytes of a result that are read."""
MOST = 32
"""Studies of a run that are shown."""
NAME = 300
"""Characters of a name in a study."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its interval; the bounds are None where there is none."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def half(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def show(self, form: str) -> str:
        """ "+0.0032 ± 0.0012" by the format of the mean."""
        half = self.half
        return f"{self.mean:{form}}" if half is None else f"{self.mean:{form}} ± {half:{form.replace('+', '')}}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a recipe: what was quantised alone, and what that did to the gradient."""

    name: str
    kind: str
    nmse: Interval
    bias2: Interval | None
    loss: Interval


@dataclass(frozen=True, kw_only=True)
class SensitivityResult:
    """Of one recipe at one step.

    Args:
        parts: by name. pareto: (share of multiply-adds kept, predicted nMSE).
        keep: patterns of the policy. kept, predicted, measured: its share of multiply-adds and its nMSE, the latter on
            batches that did not choose it.
        gain: nMSE saved against keeping nothing, batch by batch; None if nothing is kept, or in results of before it
            was measured.
    """

    step: int
    recipe: str
    batches: int
    parts: Mapping[str, Part] = field(repr=False)
    pareto: Sequence[tuple[float, float]] = field(repr=False)
    keep: Sequence[str]
    kept: float
    predicted: float
    measured: Interval
    gain: Interval | None

    def of_kind(self, kind: str) -> list[Part]:
        return [part for part in self.parts.values() if part.kind == kind]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One candidate of a ranking; gaps in nats per token, None for the reference and for what diverged.

    Args:
        spikes: where forks of it spiked.
    """

    name: str
    gap: Interval | None
    high: Interval | None
    p: float | None
    verdict: str
    group: str
    diverged: str | None
    spikes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RankingResult:
    """Of one or several checkpoints; the candidates in their order, diverged ones last.

    Args:
        checkpoints: "runs/a, step 200", …, with what trained them. forks: of each candidate at each of them.
    """

    checkpoints: Sequence[str]
    forks: int
    steps: int
    reference: str
    floor: Interval | None
    candidates: Sequence[Candidate] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Studies:
    """The results of a run, by their folders' names."""

    sensitivities: Sequence[SensitivityResult] = ()
    rankings: Sequence[RankingResult] = ()


def read_studies(run: Path, problems: list[str]) -> Studies:
    """The finished studies of a run; one that cannot be read is added to `problems`.

    Raises:
        OSError: the folder of studies cannot be read.
    """
    sensitivities: list[SensitivityResult] = []
    rankings: list[RankingResult] = []
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
                        if folder.has_file("sensitivity.json"):
                            sensitivities.append(_sensitivity(_parsed(top, folder, "sensitivity.json", problems)))
                        elif folder.has_file("rank.json"):
                            rankings.append(_ranking(_parsed(top, folder, "rank.json", problems)))
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


def _sensitivity(found: dict[str, Any]) -> SensitivityResult:
    policy = found["policy"]
    judged = policy.get("judged")
    return SensitivityResult(
        step=int(found["step"]),
        recipe=plain(found["recipe"], NAME),
        batches=int(found["batches"]),
        parts={name: _part(plain(name, NAME), part) for name, part in found["parts"].items()},
        pareto=[(_number(point["macs"]), _number(point["nmse"])) for point in found["pareto"]],
        keep=[plain(each, NAME) for each in policy["keep"]],
        kept=_number(policy["macs"]),
        predicted=_number(policy["nmse"]),
        measured=_estimate(policy["measured"]["nmse"]),
        gain=None if judged is None else _estimate(judged["gain"]),
    )


def _part(name: str, part: dict[str, Any]) -> Part:
    bias2 = part.get("bias2")
    return Part(
        name=name,
        kind=str(part["kind"]),
        nmse=_estimate(part["nmse"]),
        bias2=None if bias2 is None else _estimate(bias2),
        loss=_estimate(part["loss"]),
    )


def _estimate(found: dict[str, Any]) -> Interval:
    low, high = found["interval"] or (None, None)
    return _interval(found["mean"], low, high)


def _ranking(found: dict[str, Any]) -> RankingResult:
    pairs = {frozenset((str(p["first"]), str(p["second"]))): p for p in found["pairs"]}
    if "checkpoints" not in found:
        raise ValueError("made by an earlier fp4train: the same `fp4train rank` makes it anew")
    reference, tested = str(found["reference"]), bool(found["tested"])
    entries = {str(each["name"]): each for each in found["candidates"] if each["asked"]}
    order = [str(name) for name in found["order"]]
    candidates = []
    for name in [*order, *(each for each in entries if each not in order)]:
        entry, pair = entries[name], pairs.get(frozenset((name, reference))) if tested else None
        is_reference = name == reference
        candidates.append(
            Candidate(
                name=plain(name, NAME),
                gap=None if is_reference or "gap" not in entry else _bounded(entry["gap"]),
                high=None if is_reference or "gap_high" not in entry else _bounded(entry["gap_high"]),
                p=None if pair is None else _number(pair["p"]),
                verdict="reference" if is_reference else "" if pair is None else str(pair["verdict"]),
                group=str(entry.get("group") or ""),
                diverged=str(entry["diverged"][0]) if entry["diverged"] else None,
                spikes=[plain(each, NAME) for each in entry["spikes"]],
            )
        )
    floor = found["floor"]
    return RankingResult(
        checkpoints=[
            plain(f"{each['run']}, step {int(each['step'])}, trained in {each['trained']}", NAME)
            for each in found["checkpoints"]
        ],
        forks=int(found["forks"]),
        steps=int(found["checkpoints"][0]["settings"]["steps"]),
        reference=plain(reference, NAME),
        floor=None if floor is None else _bounded(floor),
        candidates=candidates,
    )


def _bounded(found: dict[str, Any]) -> Interval:
    return _interval(found["mean"], found["low"], found["high"])


def _interval(mean: Any, low: Any, high: Any) -> Interval:
    if low is None or high is None:
        return Interval(mean=_number(mean))
    return Interval(mean=_number(mean), low=_number(low), high=_number(high))


def _number(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value} is no finite number")
    return found
