"""Which units are kept: by damage per cost, exactly those that the policy names, and none that is
not clear.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from subjects import subject_of

from fp4train.lab.intervals import Estimate
from fp4train.lab.studies import (
    Finding,
    Judgement,
    RecipeParts,
    Sensitivity,
    SensitivityResult,
    trade_off,
)
from fp4train.lab.studies.parts import LAYER, NOTHING, WHOLE
from fp4train.lab.studies.summary import policy_file, render
from fp4train.precision import NVFP4

ONE = Estimate(mean=1.0, error=0.0, count=4, freedom=3)
FLOOR = 0.001


def finding(name: str, nmse: float, error: float = 0.0, layers: tuple[float, ...] = ()) -> Finding:
    estimate = Estimate(mean=nmse, error=error, count=4, freedom=3)
    return Finding(
        name=name, nmse=estimate, variance=None, bias2=None, cosine=ONE, loss=ONE,
        layers=layers,
    )  # fmt: skip


@pytest.fixture(scope="module")
def parts(trained: Path) -> RecipeParts:
    return RecipeParts(subject_of(trained), NVFP4(), repeats=1)


def sensitivity(parts: RecipeParts, damage: dict[str, float], **errors: float) -> Sensitivity:
    """Findings where layers do the given damage, those that are not named none."""
    found = [
        finding(WHOLE, FLOOR + sum(damage.values())),
        finding(NOTHING, FLOOR, layers=(0.0,) * len(parts.layers)),
    ]
    for name in parts.layers:
        short = name.replace(".", "_")
        found.append(
            finding(f"{LAYER}/{name}", FLOOR + damage.get(name, 0.0), errors.get(short, 0.0))
        )
    return Sensitivity(
        parts=parts, findings={each.name: each for each in found}, shares={}, signal=None, batches=4
    )


def test_the_worst_for_their_size_are_kept_and_the_prediction_adds_up(parts: RecipeParts) -> None:
    damage = {"blocks.0.attention.wo": 0.05, "blocks.1.mlp.up": 0.04, "blocks.0.mlp.down": 0.001}
    found = sensitivity(parts, damage)
    # A layer is 32·32 or 32·16 of attention, 32·64 of the MLP; a block is 3·1024 + 6·1024.
    trade = trade_off(found, keep=1 / 18)
    assert trade.policy.keep == ("blocks.0.attention.wo",) and trade.chosen.macs == pytest.approx(
        1 / 18
    )
    assert trade.chosen.nmse == pytest.approx(FLOOR + 0.041)
    trade = trade_off(found, keep=1.0)
    assert set(trade.policy.keep) == set(damage) and trade.chosen.nmse == pytest.approx(FLOOR)
    assert trade_off(found, keep=0.0).policy.keep == ()
    nmse = [point.nmse for point in trade.curve]
    assert nmse == sorted(nmse, reverse=True) and nmse[0] == pytest.approx(found.whole.nmse.mean)


def test_what_is_not_told_apart_from_no_damage_is_not_kept(parts: RecipeParts) -> None:
    damage = {"blocks.0.attention.wo": 0.05, "blocks.1.mlp.up": 0.04}
    found = sensitivity(parts, damage, blocks_1_mlp_up=0.02)
    assert trade_off(found, keep=1.0).policy.keep == ("blocks.0.attention.wo",)


def test_without_intervals_what_does_damage_is_kept(parts: RecipeParts) -> None:
    found = sensitivity(parts, {"blocks.0.mlp.up": 0.05})
    single = {k: replace(f, nmse=replace(f.nmse, error=None)) for k, f in found.findings.items()}
    assert trade_off(replace(found, findings=single), keep=1.0).policy.keep == ("blocks.0.mlp.up",)


def test_a_block_of_which_every_layer_is_kept_is_named_once(parts: RecipeParts) -> None:
    block = {name: 0.01 for name in parts.layers if name.startswith("blocks.1.")}
    policy = trade_off(sensitivity(parts, {**block, "blocks.0.mlp.up": 0.02}), keep=1.0).policy
    assert policy.keep == ("blocks.0.mlp.up", "blocks.1")


def judged(gain: Estimate) -> Judgement:
    whole = finding(WHOLE, 0.1)
    chosen = finding("chosen", 0.04)
    return Judgement(batches=8, chosen=chosen, everything=whole, gain=gain, over_own=None)


@pytest.mark.parametrize(("error", "told"), [(0.01, True), (0.05, False)])
def test_a_policy_is_judged_by_the_interval_of_what_it_saves_batch_by_batch(
    parts: RecipeParts, error: float, told: bool
) -> None:
    found = sensitivity(parts, {"blocks.0.attention.wo": 0.05, "blocks.1.mlp.up": 0.04})
    trade = trade_off(found, keep=0.15)
    gain = Estimate(mean=0.06, error=error, count=8, freedom=7)
    report = SensitivityResult.of(parts.subject, replace(found, signal=ONE), trade, judged(gain))
    said = render(report, [])
    assert (
        "judged on the 8 batches after those that chose it: nMSE 0.0400" in said
        and "0.0600 ± 0." in said
    )
    assert ("this policy is not told apart from keeping nothing" in said) is not told
    assert (
        "|G|² is 100% ± 0% of the squared gradient of a batch, not told from 0: no bias² "
        "without more batches" in said
    )


def test_a_study_that_finds_no_layer_asks_for_more_batches_and_has_no_policy(
    parts: RecipeParts,
) -> None:
    found = sensitivity(parts, {})
    trade = trade_off(found, keep=0.15)
    report = SensitivityResult.of(parts.subject, found, trade, None)
    assert policy_file(report) is None and report.policy.judged is None
    said = render(report, [])
    assert (
        "no policy: no layer's damage is told apart from the floor" in said
        and "give more, batches=…" in said
    )


def test_a_share_too_small_for_any_layer_says_what_the_least_costs(parts: RecipeParts) -> None:
    found = sensitivity(parts, {"blocks.0.mlp.up": 0.05})
    trade = trade_off(found, keep=0.0001)
    report = SensitivityResult.of(parts.subject, found, trade, None)
    said = render(report, [])
    assert (
        "no policy: of what is worth keeping blocks.0.mlp.up costs least" in said
        and "allow more" in said
    )
