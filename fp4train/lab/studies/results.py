"""rank.json, sensitivity.json and gate.json: each is a dataclass, written as its values and read by
`bind`, as a configuration is. A key that a class does not have is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fp4train.config.binding import MISSING_KEY, bind, known_part
from fp4train.errors import UserError
from fp4train.files import Folder
from fp4train.lab.analysis.figure import plain
from fp4train.lab.intervals import CONFIDENCE, Estimate
from fp4train.lab.studies.base import Base, ForkSettings
from fp4train.lab.studies.findings import Finding, Judgement, Sensitivity
from fp4train.lab.studies.forks import Fork
from fp4train.lab.studies.parts import KINDS, NOTHING
from fp4train.lab.studies.sequential import ALPHA, Pair, Verdict
from fp4train.lab.studies.subject import STUDIES, Subject
from fp4train.lab.studies.tradeoff import Point, Tradeoff
from fp4train.sealed import identity, unsealed
from fp4train.text import first_line, shortened

if TYPE_CHECKING:
    from fp4train.lab.studies.ranking import Entry, Ranking

RANKING = "rank.json"
SENSITIVITY = "sensitivity.json"
GATE = "gate.json"
LIMIT = 1 << 26
"""Bytes of a result that are read."""
MOST = 32
"""Studies of a run that are read."""
REASON = 300
"""Characters of the reason why a result cannot be read."""
NAME = 300
"""Characters of a text in a study."""

T = TypeVar("T")


# -- a sensitivity ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChosenPolicy(Point):
    """The point that was chosen.

    Args:
        keep: patterns of the policy.
        measured: its findings, on batches that did not choose it where there are some.
        judged: None: nothing is kept.
    """

    keep: tuple[str, ...]
    measured: Finding
    judged: Judgement | None


@dataclass(frozen=True, kw_only=True)
class SensitivityResult:
    """The findings on one recipe at one step.

    Args:
        identity: identity of the model, data and device (`Subject.identity`).
        signal, shares: see `Sensitivity`; shares by the plural of their kind.
        parts: findings by name of part.
        blocks: nMSE above the floor by block.
        pareto: points of cost and error, from nothing kept to everything that is worth it.
    """

    run: str
    step: int
    recipe: str
    identity: Mapping[str, Any]
    confidence: float = CONFIDENCE
    batches: int
    tokens_per_batch: int
    signal: Estimate | None
    parts: Mapping[str, Finding]
    shares: Mapping[str, Estimate]
    blocks: Mapping[str, float]
    pareto: tuple[Point, ...]
    policy: ChosenPolicy

    def __post_init__(self) -> None:
        if NOTHING not in self.parts:
            raise ValueError(f"its parts lack {NOTHING!r}")

    @classmethod
    def of(
        cls, subject: Subject, study: Sensitivity, trade: Tradeoff, judged: Judgement | None
    ) -> SensitivityResult:
        """The result of a study; `judged`: None if the policy keeps nothing."""
        return cls(
            run=subject.title,
            step=subject.step,
            recipe=study.parts.recipe.name,
            identity=subject.identity,
            batches=study.batches,
            tokens_per_batch=subject.run.config.train.step_tokens,
            signal=study.signal,
            parts=study.findings,
            shares={KINDS[kind]: share for kind, share in study.shares.items()},
            blocks={str(block): damage for block, damage in study.blocks().items()},
            pareto=tuple(trade.curve),
            policy=ChosenPolicy(
                **vars(trade.chosen),
                keep=tuple(trade.policy.keep),
                measured=study.whole if judged is None else judged.chosen,
                judged=judged,
            ),
        )

    @property
    def name(self) -> str:
        """Name of the run."""
        return Path(self.run).name

    @property
    def floor(self) -> float:
        """The nMSE of the part that quantises nothing."""
        return self.parts[NOTHING].nmse.mean

    @property
    def gain(self) -> Estimate | None:
        """nMSE that the policy saves against keeping nothing; None if nothing is kept."""
        return None if self.policy.judged is None else self.policy.judged.gain

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.parts.values() if finding.kind == kind]


# -- a ranking -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StudiedCheckpoint:
    """A checkpoint that forks begin from.

    Args:
        trained: recipe that trained it.
    """

    run: str
    step: int
    trained: str
    settings: ForkSettings

    @classmethod
    def of(cls, base: Base, **more: Any) -> Self:
        return cls(
            run=str(base.source),
            step=base.step,
            trained=base.trained,
            settings=base.settings,
            **more,
        )

    def __str__(self) -> str:
        return plain(f"{self.run}, step {self.step}, trained in {self.trained}", NAME)


@dataclass(frozen=True, kw_only=True)
class CandidateResult:
    """One candidate; gaps to the reference in nats per token, None for the reference and for what
    diverged.

    Args:
        asked, same: see `Entry`.
        group: letters of the groups that it belongs to.
        diverged: problems that ended its forks.
        gap, gap_high: gap of the losses evaluated in the recipe and in high precision.
        gaps: the gap at each checkpoint.
        tokens: see `Ranking.sampling`.
        p, verdict: result of the test against the reference; None without one.
        simultaneous: the interval of the gap that holds together with those of all other pairs.
    """

    name: str
    asked: bool
    same: tuple[str, ...]
    group: str | None
    diverged: tuple[str, ...]
    gap: Estimate | None = None
    gap_high: Estimate | None = None
    gaps: tuple[float, ...] = ()
    tokens: float | None = None
    p: float | None = None
    verdict: Verdict | None = None
    simultaneous: tuple[float, float] | None = None
    forks: tuple[Fork, ...]

    @classmethod
    def of(cls, ranking: Ranking, entry: Entry) -> CandidateResult:
        figures: dict[str, Any] = {}
        if not entry.diverged and entry is not ranking.reference:
            figures = {
                "gap": ranking.gap(entry),
                "gap_high": ranking.gap(entry, "high"),
                "gaps": tuple(gap.mean for gap in ranking.by_base(entry)),
                "tokens": ranking.sampling(entry),
            }
        pair = ranking.against_reference(entry)
        if pair is not None and ranking.tested:
            figures |= {"p": pair.p, "verdict": pair.verdict}
        if pair is not None and pair.simultaneous is not None:
            low, high = pair.simultaneous
            ends = (low, high) if pair.first == ranking.reference.name else (-high, -low)
            figures["simultaneous"] = ends
        return cls(
            name=entry.name,
            asked=entry.asked,
            same=tuple(entry.same),
            group=ranking.groups.get(entry.name),
            diverged=tuple(entry.diverged),
            forks=tuple(fork for fork in entry.forks if fork is not None),
            **figures,
        )


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """A ranking on one or several checkpoints. That of several runs is equal in the folder of each.

    Args:
        checkpoints: checkpoints that forks begin from.
        units: independent runs among those of the checkpoints.
        forks: forks of each candidate at each checkpoint.
        tested: there were enough forks for a test.
        recorded: candidates of the record that were compared.
        floor: FP32 − BF16.
        candidates: the best first, then those that diverged or were not asked for.
        order: names of the candidates that were ranked, the best first.
    """

    checkpoints: tuple[StudiedCheckpoint, ...]
    units: int
    reference: str
    forks: int
    look: int | None
    tested: bool
    recorded: int
    margin: float
    alpha: float = ALPHA
    validation_tokens: int
    floor: Estimate | None
    candidates: tuple[CandidateResult, ...]
    order: tuple[str, ...]
    pairs: tuple[Pair, ...]

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise ValueError("it has no checkpoints")

    @classmethod
    def of(cls, ranking: Ranking) -> RankResult:
        ranked = ranking.ranked
        unranked = [entry for entry in ranking.entries if not any(entry is x for x in ranked)]
        return cls(
            checkpoints=tuple(map(StudiedCheckpoint.of, ranking.bases)),
            units=len(set(ranking.units)),
            reference=ranking.reference.name,
            forks=ranking.per_base,
            look=ranking.look,
            tested=ranking.tested,
            recorded=len(ranking.compared_entries),
            margin=ranking.margin,
            validation_tokens=sum(ranking.bases[0].targets),
            floor=ranking.floor,
            candidates=tuple(CandidateResult.of(ranking, entry) for entry in (*ranked, *unranked)),
            order=tuple(entry.name for entry in ranked),
            pairs=tuple(ranking.pairs),
        )

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
        rate = "own schedule"
        if base.settings.schedule != "own":
            rate = f"rate {base.settings.lr:.3g} → 0"
        return f"from step {base.step}, {rate}"

    @property
    def results(self) -> list[CandidateResult]:
        """The candidates that the command named."""
        return [candidate for candidate in self.candidates if candidate.asked]


# -- a gate ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GateCheckpoint(StudiedCheckpoint):
    """A checkpoint of a gate, and the mean difference there; None: a fork diverged."""

    mean: float | None


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """The answer of a gate. That on several runs is equal in the folder of each.

    Args:
        recipe: name of the recipe that was tested.
        against: name of the reference.
        margin: nats per token.
        pairs: pairs of forks at all checkpoints, and their number when the verdict fell.
        gap: mean difference in nats per token; None: there is none, or a fork diverged.
        interval: ends of the interval of the gap at the verdict's confidence.
    """

    checkpoints: tuple[GateCheckpoint, ...]
    recipe: str
    against: str
    margin: float
    bound: float
    alpha: float = ALPHA
    verdict: str
    pairs_at_verdict: int
    pairs: int
    gap: float | None
    gap_high: float | None
    interval: tuple[float | None, float | None]
    differences: tuple[tuple[float | None, ...], ...]
    diverged: tuple[str, ...]
    earlier: tuple[Mapping[str, Any], ...] = field(hash=False)


# -- reading ---------------------------------------------------------------------------------------

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
        run_identity = identity(top)
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
                        saved = unsealed(folder.read(file, LIMIT))
                        result: Any = bound(saved, _RESULTS[file])
                        if run_identity and saved["identity"]["run"] not in (None, run_identity):
                            raise ValueError("it is of another run")
                        results[file].append(result)
                except (OSError, ValueError, LookupError, UserError, RecursionError) as error:
                    problems.append(f"{path} cannot be read{_why(error)}")
    sensitivities, rankings, gates = results.values()
    return Studies(sensitivities=sensitivities, rankings=rankings, gates=gates)


def _why(error: Exception) -> str:
    """Why a result cannot be read, as the end of a sentence."""
    key = str(error).removesuffix(MISSING_KEY)
    if key != str(error):
        return (
            f" (it has no {key!r}): another version of fp4train wrote it, or it was changed; the "
            "same command writes it anew"
        )
    return f" ({shortened(first_line(error), REASON)})"


def bound(saved: Any, kind: type[T]) -> T:
    """What a study wrote, as an object of class `kind`.

    Raises:
        UserError: a key is missing, or its value has another type.
    """
    record: T = bind(known_part(saved, kind), kind, "")
    return record
