"""What a gate is asked, and what the records of its checkpoints hold of earlier questions.

A record is one checkpoint's. Beside its forks it holds the bound of each pair of recipes, in whatever
order, which the first question sets for good, and every answer:

    "bound/PAIR": {"bound": 0.1}
    "answer/3":   {"pair": PAIR, "of": [checkpoints], "margin": 0.01, "verdict": "within", …}

The folder of the run keeps bound and answers, too (`kept`), wherever the record lies.

The bound is the only choice on which the error depends. Questions with other margins on the same
forks have one error probability together (`betting`); they are recorded so that nobody who reads an
answer is in doubt about which was asked first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from fp4train.config.binding import bind
from fp4train.config.command_line import WholeNumber
from fp4train.errors import UserError
from fp4train.lab.gate.betting import BOUND, GateVerdict
from fp4train.lab.gate.kept import KeptQuestions
from fp4train.lab.studies import ForkRequest, Forks, StudyRecord

LARGEST = 100
"""Nats per token that no loss of a model lies from another."""
_ANSWER = "answer/"
_BOUND = "bound/"


@dataclass(frozen=True, kw_only=True)
class GateRequest(ForkRequest):
    """The question of a gate.

    Args:
        chosen: "recipe=nvfp4", and words on policy, phases and keys: what is tested.
        against: recipe of the reference, under the run's own policy.
        margin: nats per token; the largest gap that does not matter.
        forks: most seeds at each checkpoint; 0: the number that is needed is said, none are made;
            null: that number for a gap of half the margin.
        bound: nats per token; the largest difference of a fork that counts in full; None: that of
            the record, or ten margins.
        deviation: assumed standard deviation of a seed's mean difference over the checkpoints; None:
            as measured so far, or a quarter of the margin.
    """

    study: ClassVar[str] = "gate"
    noun: ClassVar[str] = "gate"

    against: str = "bf16"
    margin: float
    forks: WholeNumber | None = None
    bound: float | None = None
    deviation: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("margin", "bound", "deviation"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= LARGEST:
                raise ValueError(
                    f"{name}={value:g} must be a number of nats per token above 0, up to {LARGEST}"
                )
        if self.bound is not None and self.bound <= self.margin:
            raise ValueError(
                f"bound={self.bound:g} must be larger than margin={self.margin:g}: it is the "
                "largest difference of one fork, whose mean the margin limits"
            )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An earlier answer.

    Args:
        of: titles of its checkpoints.
        pairs: pairs of forks that it saw.
    """

    margin: float
    of: tuple[str, ...]
    pairs: int
    verdict: GateVerdict


class Questions:
    """The questions about one pair of recipes, in the records of the checkpoints."""

    def __init__(self, forks: Sequence[Forks]) -> None:
        self.of = [base_forks.base.title for base_forks in forks]
        self._places: list[tuple[Forks, StudyRecord | KeptQuestions]] = []
        for base_forks in forks:
            kept = KeptQuestions(base_forks.base)
            self._places += [(base_forks, kept), (base_forks, base_forks.record)]

    def bound(self, request: GateRequest) -> float:
        """The bound of the records, or the one that this question sets in them by `begin`.

        Raises:
            UserError: the records, or the request, have different ones, or one not above the
                margin.
        """
        recorded: dict[str, float] = {}
        for base_forks, place in self._places:
            if values := place.known.get(f"{_BOUND}{_pair(base_forks)}"):
                recorded[base_forks.base.title] = float(values["bound"])
        if len(set(recorded.values())) > 1:
            listed = ", ".join(f"{title}: {bound:g}" for title, bound in recorded.items())
            raise UserError(
                f"earlier gates had different bounds there ({listed}): a difference of a fork "
                "counts alike at all checkpoints; ask of those with one bound"
            )
        bound = next(iter(recorded.values()), request.bound or BOUND * request.margin)
        if request.bound not in (None, bound):
            raise UserError(
                f"bound={request.bound:g}: the record began with bound={bound:g}, which stays; "
                "leave it out. Another record has the same seeds, so the same forks: a bound that "
                "is chosen when they are known promises nothing"
            )
        if bound <= request.margin:
            raise UserError(
                f"margin={request.margin:g} must be below the bound of the record, {bound:g}: the "
                "differences of its forks count up to there; ask for a smaller margin"
            )
        return bound

    def begin(self, bound: float) -> None:
        """Write the bound into every record that lacks it, before there are forks."""
        for base_forks, place in self._places:
            key = f"{_BOUND}{_pair(base_forks)}"
            if key not in place.known:
                place.add(key, {"bound": bound})

    @property
    def answers(self) -> list[Answer]:
        """The answers so far, each once."""
        answers: dict[Answer, None] = {}
        for base_forks, place in self._places:
            for key, values in place.known.items():
                if key.startswith(_ANSWER) and values["pair"] == _pair(base_forks):
                    answers[_answer(values)] = None
        return list(answers)

    def record(self, answer: Answer) -> None:
        """Write an answer into every record that lacks it."""
        for base_forks, place in self._places:
            earlier = [key for key in place.known if key.startswith(_ANSWER)]
            pair = _pair(base_forks)
            if any(
                place.known[key]["pair"] == pair and _answer(place.known[key]) == answer
                for key in earlier
            ):
                continue
            place.add(f"{_ANSWER}{len(earlier) + 1}", {"pair": pair, **asdict(answer)})


def _pair(forks: Forks) -> str:
    """The two recipes at a checkpoint, by the keys of their forks, whichever of them is the
    reference: both questions are about the same forks.
    """
    return " ".join(sorted(branch.key for branch in forks.base.branches))


def _answer(values: Mapping[str, Any]) -> Answer:
    """An answer as a record has it."""
    answer: Answer = bind({k: v for k, v in values.items() if k != "pair"}, Answer, "answer")
    return answer
