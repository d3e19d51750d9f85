"""The study of a recipe's gradients: every part on every batch.

What is measured stands in the record, so that a study that was killed goes on. Two calls give the
same numbers to the bit: the batches are those that the run would train on next, and
the random bits of repeat r are those of seed r at the step of the batch.
"""

from collections.abc import Callable
from typing import Any

from fp4train.errors import UserError
from fp4train.lab.studies.findings import Judgement, Sensitivity, judgement, summarise
from fp4train.lab.studies.gradients import GradientMeter
from fp4train.lab.studies.parts import (
    BASELINE,
    CHOSEN,
    OF_THE_RUN,
    WHOLE,
    RecipePart,
    RecipeParts,
)
from fp4train.lab.studies.record import LOSS_SCALE, Reading, Shown, StudyRecord
from fp4train.lab.studies.subject import Subject, described
from fp4train.precision import LayerPolicy, Recipe
from fp4train.run.state.numbers import coming_loss_scale

GROUP = 4
"""Batches that are measured together; products of their errors give the systematic bias."""


def identity_of(subject: Subject, recipe: Recipe, repeats: int) -> dict[str, Any]:
    """The identity with which the record of the study must agree."""
    identity = {
        "study": "sensitivity",
        **subject.identity,
        "recipe": described(recipe),
        "repeats": repeats,
    }
    if recipe.loss_scaling is not None:
        identity[LOSS_SCALE] = coming_loss_scale(subject.run, recipe)
    return identity


def groups_of(subject: Subject, batches: int) -> list[range]:
    """The groups of batches in the order in which they are measured; batch 0 is the one that the
    run trains on next.

    Raises:
        UserError: the data has too few batches, of which some must be left to judge the policy.
    """
    most = max(2, subject.run.data.training.batches_per_epoch)
    if batches >= most:
        raise UserError(
            f"batches={batches}: the training data has {most} different batches of "
            "this size, and the policy is "
            f"judged on some that did not choose it; give batches={most // 2} or fewer"
        )
    return _grouped(0, batches)


def _grouped(start: int, stop: int) -> list[range]:
    return [range(i, min(i + GROUP, stop)) for i in range(start, stop, GROUP)]


class Study:
    """Measures parts on batches, and keeps what is measured in the record.

    Args:
        subject: model to study; `end` leaves it as it was.
        recipe: recipe to study.
        batches: number of batches of every part.
        repeats: number of passes over each batch with other random bits, for parts that round
            stochastically and are no single layer.
        record: record of the measurements, opened with `identity_of`.

    Raises:
        UserError: the recipe or the model has nothing to measure, or the data has too few batches.
    """

    def __init__(
        self, subject: Subject, recipe: Recipe, batches: int, repeats: int, record: StudyRecord
    ) -> None:
        self.record = record
        self.parts = RecipeParts(subject, recipe, repeats=repeats)
        self._gradients = GradientMeter(subject, self.parts.reference, list(self.parts.layers))
        self._groups = groups_of(subject, batches)
        self._measured: dict[str, list[Reading]] = {BASELINE: []}
        self._listed = list(self.parts.all())

    def run(self, shown: Shown) -> Sensitivity:
        """Measure every part.

        Raises:
            UserError: a gradient is not finite.
        """
        plan = [part for _ in self._groups for part in self._listed]
        for number, part in enumerate(plan):
            shown(number, len(plan), part.name)
            self._measure(part)
        return summarise(self.parts, self._listed, self._measured)

    def judge(self, policy: LayerPolicy, shown: Shown) -> Judgement:
        """Measure the recipe under `policy`, with nothing kept and under the run's policy, on the
        batches after those that chose it, as many as measured the whole recipe (or as there are).
        """
        began = self._groups[len(self._measured[BASELINE]) - 1].stop
        count = sum(len(group["error"]) for group in self._measured[WHOLE])
        groups = _grouped(
            began,
            min(began + count, max(2, self.parts.subject.run.data.training.batches_per_epoch)),
        )
        compared = [part for part in self._listed if part.name in (WHOLE, OF_THE_RUN)]
        measured = {}
        for number, part in enumerate([self.parts.under(policy, CHOSEN), *compared]):
            shown(
                number, 1 + len(compared), f"{part.name}, on batches that did not choose the policy"
            )
            measured[part.name] = part, [self._of(part, group) for group in groups]
        return judgement(measured, [self._of_reference(group) for group in groups])

    def end(self) -> None:
        """Leave the subject as it was."""
        self._gradients.end()

    def _measure(self, part: RecipePart) -> None:
        """The next group of batches of a part."""
        done = self._measured.setdefault(part.name, [])
        number = len(done)
        group = self._groups[number]
        if number == len(self._measured[BASELINE]):
            self._measured[BASELINE].append(self._of_reference(group))
        done.append(self._of(part, group))

    def _of(self, part: RecipePart, group: range) -> Reading:
        return self._recorded(part.key, group, lambda: self._gradients.measure(part, group))

    def _of_reference(self, group: range) -> Reading:
        return self._recorded(BASELINE, group, lambda: self._gradients.of_reference(group))

    def _recorded(self, key: str, group: range, measure: Callable[[], Reading]) -> Reading:
        key = f"{key} {group.start}-{group.stop - 1}"
        if key in self.record:
            return self.record[key]
        return self.record.add(key, measure())
