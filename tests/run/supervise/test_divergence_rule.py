"""The rule that tells a divergence from noise, and the places of the batches after some were
skipped.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from simulate_divergence import FALLING, STEPS, false_alarms, seen_at

from fp4train.config import bind
from fp4train.errors import UserError
from fp4train.run.supervise.loss_history import PERSIST, Divergence

DEFAULT: list[float] = json.loads((Path(__file__).parent / "default_losses.json").read_text())
"""The training losses of `fp4train`, 300 steps."""


def test_the_default_run_raises_no_alarm() -> None:
    found = Divergence()
    for step, loss in enumerate(DEFAULT):
        found.add(step, loss)
        assert found.since is None, step
    assert not found.ends_above_its_beginning(300)


NOISE: dict[str, Callable[[random.Random, float], float]] = {
    "a tenth of a nat": lambda draw, loss: loss + draw.gauss(0, 0.1),
    "half a nat": lambda draw, loss: loss + draw.gauss(0, 0.5),
    "one batch in ten up to four nats higher": lambda draw, loss: (
        loss + draw.gauss(0, 0.1) + (draw.uniform(1, 4) if draw.random() < 0.1 else 0)
    ),
    "exponential spikes": lambda draw, loss: (
        loss + (draw.expovariate(0.3) if draw.random() < 0.1 else 0)
    ),
    "heavy tails": lambda draw, loss: loss + 0.1 * math.tan(math.pi * (draw.random() - 0.5)),
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_of_small_batches_raises_no_alarm(noise: str) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        losses = [NOISE[noise](draw, 1.5 + 4 * math.exp(-step / 200)) for step in range(2000)]
        assert seen_at(losses) is None, seed


@pytest.mark.parametrize("known", [0, 4, 200])
def test_a_loss_of_nearly_nothing_that_multiplies_raises_no_alarm(known: int) -> None:
    """As of a model that knows its data by heart and goes on, after `known` steps."""
    draw = random.Random(known)
    losses = [0.002 * math.exp(draw.gauss(0, 0.3)) for _ in range(known)]
    forgotten = [draw.uniform(0.005, 0.06) for _ in range(60)]
    assert seen_at([*losses, 0.001, *forgotten]) is None
    assert seen_at([*losses, 0.001, *forgotten, *[0.4] * 40]) is not None


@pytest.mark.parametrize("rise", [1, 10, 40, 100])
def test_a_run_that_climbs_from_its_beginning_far_above_ln_v_has_diverged(rise: int) -> None:
    """As at a rate that is too large from the first step on: no past was ever low."""
    draw = random.Random(rise)
    found = Divergence(uniform=math.log(257))
    for step in range(rise + 60):
        found.add(step, 5.5 + 3 * min(1, step / rise) + draw.gauss(0, 0.1))
    found.end()
    assert found.seen and found.beyond_noise and not found.is_good


def test_a_first_loss_far_above_ln_v_that_falls_raises_no_alarm() -> None:
    draw = random.Random(0)
    found = Divergence(uniform=math.log(257))
    for step in range(100):
        found.add(step, 6 + 9 * math.exp(-step / 60) + draw.gauss(0, 0.2))
    found.end()
    assert not found.seen and found.is_good


def test_a_small_step_up_as_by_a_swap_raises_no_alarm() -> None:
    assert seen_at([*DEFAULT, *(loss * 1.15 for loss in DEFAULT[-60:])]) is None


@pytest.mark.parametrize("step", [1, 20, 50, 150, 299])
def test_a_ruined_weight_is_seen_after_five_losses(step: int) -> None:
    draw = random.Random(step)
    ruined = [2 * math.log(320) + draw.gauss(0, 0.1) + (20 if step == 1 else 0) for _ in range(8)]
    assert seen_at([*DEFAULT[:step], *ruined]) == step + PERSIST - 1


@pytest.mark.parametrize("step", [5, 15, 20, 30, 41, 50, 150, 290])
def test_weights_that_tell_nothing_any_more_are_seen_at_once_or_at_the_end(step: int) -> None:
    """One flipped bit takes the loss to that of equally likely bytes. While the run has learned
    little that is not far above its past.
    """
    draw = random.Random(step)
    found = Divergence()
    seen = None
    for number in range(300):
        found.add(number, DEFAULT[number] if number < step else math.log(320) + draw.gauss(0, 0.05))
        seen = number if found.seen and seen is None else seen
    assert seen == step + PERSIST - 1 if step >= 15 else found.ends_above_its_beginning(300)


def test_a_loss_that_stays_just_above_its_beginning_after_one_that_was_huge_is_seen() -> None:
    """As a rate of 1e3 leaves it: weights so large that every token is as likely as another."""
    assert seen_at([5.49, 7_345_822.5, 5.77, 5.77, 5.77, 5.77]) == 5


@pytest.mark.parametrize("kind", FALLING)
@pytest.mark.parametrize(("runs", "fall"), [(2, 30), pytest.param(10, 200, marks=pytest.mark.long)])
def test_falling_losses_raise_no_alarm_in_runs_of_2000_steps(
    kind: str, runs: int, fall: float
) -> None:
    assert false_alarms(kind, runs, fall) == 0


def test_simulations_of_rises_have_runs_with_and_without_alarm() -> None:
    calm = 1.5 + 4 * np.exp(-np.arange(STEPS) / 200)
    risen = calm.copy()
    risen[500:505] += 2
    assert [seen_at(losses.tolist()) for losses in (calm, risen)] == [None, 504]


@pytest.mark.parametrize("fall", [10, 20])
@pytest.mark.parametrize("step", [20, 30, 41, 55])
def test_a_jump_back_to_equally_likely_tokens_on_a_falling_loss_is_seen_after_five_losses(
    step: int, fall: float
) -> None:
    """Losses within those of the last 32 steps, which a window alone cannot tell from the past."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        losses = 2.5 + 3.3 * np.exp(-np.arange(step) / fall) + draw.normal(0, 0.05, step)
        ruined = math.log(320) + draw.normal(0, 0.05, 10)
        assert seen_at([*losses.tolist(), *ruined.tolist()]) == step + PERSIST - 1


@pytest.mark.parametrize("step", [30, 45, 60, 100])
def test_weights_that_are_drawn_anew_and_learn_again_at_once_are_seen(step: int) -> None:
    """The first losses are above all of the past, and the next ones below its first ones."""
    again = [DEFAULT[0] + 0.2, *DEFAULT[:12]]
    found = Divergence(uniform=math.log(257))
    seen = None
    for number, loss in enumerate([*DEFAULT[:step], *again]):
        found.add(number, loss)
        assert number < step or not found.is_good
        seen = number if found.seen and seen is None else seen
    assert seen == step + PERSIST - 1


def test_only_losses_that_fit_the_curve_before_them_make_a_state_good() -> None:
    """On a falling curve: a loss that stays where it is is none of them, long before it is a
    divergence.
    """
    falling = [2.5 + 3.3 * math.exp(-step / 20) + 0.02 * (-1) ** step for step in range(41)]
    found = Divergence()
    for step, loss in enumerate(falling):
        found.add(step, loss)
        assert found.is_good, step
    for rise in (0.7, 0.8, 2.5):
        after = Divergence(**asdict(found))
        after.add(41, falling[-1] + rise)
        assert not after.is_good and not after.seen
        assert (after.since is None) == (rise < 1), "small rises are noise, and prove nothing"


@pytest.mark.parametrize("rising", [20, 40, 60, 120])
@pytest.mark.parametrize("top", [4.0, math.log(257)])
def test_a_slow_rise_is_seen_though_the_past_and_the_trend_follow_it(
    rising: int, top: float
) -> None:
    draw = random.Random(rising)
    low = DEFAULT[149]
    slow = [low + (top - low) * min(1.0, step / rising) for step in range(150)]
    found = Divergence(uniform=math.log(257))
    proven = []
    for step, loss in enumerate([*DEFAULT[:150], *slow]):
        found.add(step, loss + draw.gauss(0, 0.03))
        if step > 150 and found.is_good:
            proven.append(loss)
        if found.seen:
            break
    assert found.since is not None and 150 < found.since < step < 150 + rising
    assert max(proven, default=low) < 1.35 * low
    for later, loss in enumerate([top] * 100 + DEFAULT[145:149], start=step + 1):
        found.add(later, loss)
        assert found.seen, later
    found.add(later + 1, DEFAULT[149])
    assert not found.seen and found.since is None, "five losses are back"


def test_losses_that_go_back_to_those_of_equally_likely_tokens_are_a_divergence_after_twelve() -> (
    None
):
    """On the way down, where they are within all that was before them."""
    falling = [5.5 - 0.06 * step for step in range(25)]
    lost = [4.6, 4.9, 5.2, *[5.4] * 12]
    found = Divergence(uniform=5.5)
    for step, loss in enumerate([*falling, *lost]):
        assert not found.seen, step
        found.add(step, loss)
        assert step < 28 or not found.is_good, step
    assert found.seen and found.since == 28
    assert found.bar == pytest.approx(0.95 * 5.5)
    at_the_end = Divergence(uniform=5.5)
    for step, loss in enumerate([*falling, *lost[:8]]):
        at_the_end.add(step, loss)
    assert not at_the_end.seen
    at_the_end.end()
    assert at_the_end.seen and at_the_end.since == 28


@pytest.mark.parametrize("share", [0.82, 0.88])
def test_a_plateau_near_ln_v_that_goes_up_to_it_is_a_divergence(share: float) -> None:
    """As where half of the labels are noise, and no loss is a fifth below ln V."""
    draw = random.Random(0)
    found = Divergence(uniform=math.log(32_000))
    level = share * found.uniform
    for step in range(120):
        found.add(step, (level if step < 100 else found.uniform) + draw.gauss(0, 0.05))
        assert found.seen == (step >= 111), step
        assert step < 104 or not found.is_good, step
    assert found.since == 100


@pytest.mark.parametrize("share", [0.7, 0.75, 0.85])
def test_an_evaluation_near_ln_v_ends_a_run_whose_losses_were_below(share: float) -> None:
    """The last update ruins the weights, and one and a half times the evaluation before is above
    ln V; validation that is not like the text that is known by heart tells nothing.
    """
    for knows_by_heart in (False, True):
        found = Divergence(uniform=math.log(32_000))
        level = share * found.uniform
        for step in range(100):
            found.add(step, level / (8 if knows_by_heart else 1))
        found.add_evaluation(level, ends=False)
        found.add(100, level / (8 if knows_by_heart else 1))
        found.end()
        found.add_evaluation(found.uniform, ends=True)
        assert found.beyond_noise != knows_by_heart


@pytest.mark.parametrize(("last", "seen"), [(2.7, False), (4.2, True)])
def test_an_evaluation_of_few_letters_ends_a_run_where_it_doubles(last: float, seen: bool) -> None:
    """As of DNA, whose losses are not compared with ln V; the last update ruins the weights."""
    found = Divergence()
    for step in range(100):
        found.add(step, 1.4 + 0.1 * (step % 3))
    found.add_evaluation(1.5, ends=False)
    found.add(100, 1.4)
    found.end()
    found.add_evaluation(last, ends=True)
    assert found.beyond_noise == seen


def test_one_loss_far_below_that_of_equally_likely_tokens_takes_the_proof_from_those_near_it() -> (
    None
):
    found = Divergence(uniform=5.0)
    for step, loss in enumerate([4.9, 4.8, 4.7, 4.6]):
        found.add(step, loss)
        assert found.is_good, "nothing is learned yet"
    found.add(4, 3.9)
    assert found.would_fit(4.75) and not found.would_fit(4.76)
    for step, loss in enumerate([4.8, 4.85, 4.8, 4.7], start=5):
        found.add(step, loss)
    assert found.fits and not found.is_good, "one is low by chance"
    unknown = Divergence()
    for step, loss in enumerate([4.9, 4.8, 4.7, 4.6, 3.9]):
        unknown.add(step, loss)
    assert unknown.would_fit(4.76), "where V is not known"


def test_a_rise_from_the_trend_is_over_when_five_losses_are_back() -> None:
    falling = [2.5 + 3.3 * math.exp(-step / 20) for step in range(60)]
    found = Divergence()
    for step, loss in enumerate([*falling[:41], *[5.77] * 8, *falling[41:45]]):
        found.add(step, loss)
    assert (
        found.seen and found.from_trend and found.measured_from[0] == pytest.approx(2.97, abs=0.1)
    )
    found.add(53, falling[45])
    assert not found.seen and not found.from_trend and found.since is None


def test_a_single_outlier_is_noise_and_does_not_blind() -> None:
    spiked = [*DEFAULT[:100], 1e6, *DEFAULT[100:110]]
    assert seen_at(spiked) is None
    assert seen_at([*spiked, *[8.0] * 5]) == 115


@pytest.mark.parametrize("later", [1, 20, 40])
def test_four_huge_losses_in_a_row_do_not_hide_a_collapse_that_comes_later(later: int) -> None:
    draw = random.Random(later)
    calm = [2.2 + draw.gauss(0, 0.05) for _ in range(60 + later)]
    assert seen_at([*calm[:60], *[1e6] * 4, *calm[60:], *[10.0] * 5]) == 68 + later


@pytest.mark.parametrize("begin", [0, 40])
def test_a_model_that_is_tuned_and_ruined_by_its_first_update_has_diverged(begin: int) -> None:
    """One loss alone was low, of a new run or of a branch with other data, and the others are within
    the limit that few losses have.
    """
    found = Divergence(uniform=math.log(257), known=begin).anew()
    for step in range(begin, begin + 30):
        found.add(step, 5.56 if step > begin else 3.0)
    assert found.beyond_noise


@pytest.mark.parametrize("known", [20, 40, 60, 200])
def test_a_model_that_comes_back_to_a_third_above_its_curve_has_diverged(known: int) -> None:
    """The high losses of the beginning, which are in a short past, are no level to come back to."""
    draw = random.Random(known)
    losses = [2.2 + 3 * math.exp(-step / 10) + draw.gauss(0, 0.1) for step in range(known)]
    found = Divergence(uniform=math.log(257))
    for step, loss in enumerate(losses):
        found.add(step, loss)
    trend = found.trend
    for step in range(40):
        found.add(known + step, 4 / 3 * trend + 9 * math.exp(-step / 4) + draw.gauss(0, 0.1))
    assert found.beyond_noise
    for step in range(PERSIST):
        assert found.seen and not found.is_good
        found.add(known + 40 + step, trend)
    assert not found.seen


def test_a_divergence_is_over_after_five_losses_within_its_past() -> None:
    found = Divergence()
    for step, loss in enumerate([*DEFAULT[:100], *[50.0] * 20, *DEFAULT[100:104]]):
        found.add(step, loss)
    assert found.seen and found.since == 100
    found.add(124, DEFAULT[104])
    assert not found.seen and found.since is None and max(found.past) < 5


@pytest.mark.parametrize(
    ("last", "above"), [(5.4, False), (5.5, False), (5.8, True), (100.0, True)]
)
def test_a_run_that_ends_above_where_it_began(last: float, above: bool) -> None:
    found = Divergence()
    for step, loss in enumerate([*(5.4 + 0.001 * step for step in range(100)), *[last] * 5]):
        found.add(step, loss)
    assert found.ends_above_its_beginning(105) == above


def test_batches_are_skipped_once_and_stay_skipped() -> None:
    found = Divergence(since=12, high=5, past=(1.0,))
    once = found.rewind(10, 17)
    assert once.skips == ((10, 7),) and once.record == {"diverged": 13, "skipped": [10, 16]}
    found.skips = once.skips
    assert [step + found.skipped(step) for step in (9, 10, 20)] == [9, 17, 27]
    later = found.rewind(15, 20)
    assert later.skips == ((10, 7), (15, 12)) and later.record["skipped"] == [22, 26]
    further = found.rewind(5, 20)
    assert further.skips == ((5, 22),), "what was skipped before lies among them"


def test_the_state_is_restored_and_nonsense_is_refused() -> None:
    found = Divergence()
    for step, loss in enumerate([*DEFAULT[:40], 9.0, 9.0]):
        found.add(step, loss)
    assert bind(json.loads(json.dumps(asdict(found))), Divergence, "divergence") == found
    for wrong in (
        {"since": 3},
        {"high": 5},
        {"since": 1, "high": 1},
        {"skips": [[-1, 3]]},
        {"past": ["a"]},
        {"x": 1},
    ):
        with pytest.raises(UserError):
            bind(wrong, Divergence, "divergence")


def test_noise_after_few_losses_is_no_diverged_end_and_a_jump_after_them_is() -> None:
    """Losses of single answers, which vary by half, in runs of 60 steps: one in nine is told of a
    rise, as the first ones were low; at most one in thirty ends with the code of a divergence.
    """
    draw = np.random.default_rng(1)
    told = 0
    ended = 0
    for _ in range(300):
        noisy = Divergence(uniform=math.log(50_000))
        for step, loss in enumerate(draw.lognormal(0.2, 0.5, 60)):
            noisy.add(step, float(loss))
        told += noisy.seen
        ended += noisy.beyond_noise
    assert ended <= 10 < told
    for level in (2.0, 5.4):
        jumped = Divergence(uniform=math.log(257))
        for step, loss in enumerate([1.0, 1.1, *draw.normal(level, 0.1, 20)]):
            jumped.add(step, float(loss))
        assert jumped.seen and jumped.beyond_noise
        jumped.last = ()
        assert jumped.beyond_noise, "a history that was saved without them"


@pytest.mark.parametrize(
    ("evaluations", "seen"),
    [
        ([12.23, 12.06], False),  # of other text than is trained on
        ([3.2, 7.0], False),
        ([3.2, 7.1], True),  # half the way to ln V
        ([2.0, 2.9], False),
        ([20.0], False),
        ([22.0], True),
    ],
)
def test_an_evaluation_at_the_end_judges_by_the_one_before(
    evaluations: list[float], seen: bool
) -> None:
    found = Divergence(uniform=math.log(50_257))
    for step in range(100):
        found.add(step, 3.0 if step else 10.8)
    *earlier, last = evaluations
    for loss in earlier:
        found.add_evaluation(loss, ends=False)
    found.add(100, 3.0)
    found.add_evaluation(last, ends=True)
    assert found.seen == found.beyond_noise == seen


def test_an_evaluation_is_judged_by_the_one_before_also_where_the_first_losses_are_as_high() -> (
    None
):
    """As of a short run that goes on with a rate that is too high for a few steps."""
    found = Divergence(uniform=math.log(257))
    for step in range(60):
        found.add(step, 2.5 + 3 * math.exp(-step / 10))
    found.add_evaluation(2.5, ends=False)
    for step, loss in enumerate((2.5, 4.9, 4.75), start=60):
        found.add(step, loss)
    found.end()
    found.add_evaluation(4.77, ends=True)
    assert found.beyond_noise


@pytest.mark.parametrize("risen", [1, 2, 4])
@pytest.mark.parametrize("evaluations", ["none before", "before", "in each step"])
def test_weights_that_tell_nothing_in_the_last_steps_are_a_divergence_by_both_losses(
    risen: int, evaluations: str
) -> None:
    found = Divergence(uniform=math.log(257))
    for step in range(100):
        found.add(step, 2.5 if 0 < step < 100 - risen else 5.6)
        if evaluations == "in each step" or (evaluations == "before" and step == 50):
            found.add_evaluation(2.5 if step + 1 < 100 - risen else 5.6, ends=False)
    found.end()
    found.add_evaluation(5.6, ends=True)
    assert found.beyond_noise and found.measured_from[0] == 2.5


@pytest.mark.parametrize("left", [1, 2, 4])
def test_a_ruined_state_that_was_evaluated_at_once_is_no_measure_of_the_end(left: int) -> None:
    """Its loss is known a step later, and fewer than five are left."""
    found = Divergence(uniform=math.log(257))
    for step in range(40 + left):
        found.add(step, 3.0 if step < 40 else 9.0)
        if step in (19, 39):
            found.add_evaluation(3.0 if step == 19 else 9.0, ends=False)
    found.end()
    found.add_evaluation(9.0, ends=True)
    assert found.evaluated == 9.0 and found.beyond_noise


@pytest.mark.parametrize("damaged", [5, 10])
@pytest.mark.parametrize(
    ("rise", "evaluated", "seen"), [(1.5, 1.5, 1), (1.5, 1.1, 0), (1.0, 1.5, 0)]
)
def test_damage_within_the_noise_of_the_last_steps_is_seen_where_the_evaluation_rises_with_it(
    damaged: int, rise: float, evaluated: float, seen: int
) -> None:
    """An evaluation alone also rises where a model has too few data."""
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(1, 0.15, 150)
        found = Divergence(uniform=math.log(50_257), evaluated=2.1)
        for step, loss in enumerate(2.1 * noise):
            found.add(step, loss * (rise if step >= 150 - damaged else 1))
        found.add_evaluation(2.1 * evaluated, ends=True)
        assert found.beyond_noise == bool(seen), seed


def test_a_high_end_stays_doubtful_where_the_evaluation_rises_too() -> None:
    for evaluations, doubtful in (([1.0, 2.9], True), ([2.8, 2.9], False)):
        found = Divergence(uniform=math.log(50_257), evaluated=evaluations[0])
        for step in range(100):
            found.add(step, 3.0)
        found.add(100, 6.0)
        found.add_evaluation(evaluations[1], ends=True)
        assert (found.since is not None) == doubtful and not found.seen


@pytest.mark.parametrize(("last", "seen"), [(5.77, True), (4.6, True), (3.3, False)])
def test_the_last_update_of_a_student_is_judged_by_its_evaluation(last: float, seen: bool) -> None:
    """The loss of its steps is against the teacher, and no later step shows it."""
    found = Divergence()
    for step in range(40):
        found.add(step, 1.0 + 0.3 * math.exp(-step / 10))
        if step % 20 == 10:
            found.add_evaluation(3.0, ends=False, uniform=math.log(257))
    found.end()
    found.add_evaluation(last, ends=True, uniform=math.log(257))
    assert found.beyond_noise == seen
