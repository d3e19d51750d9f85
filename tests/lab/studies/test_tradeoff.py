"""Which units are kept: by damage per cost, exactly those that the policy names, and none that is
not clear.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from subjects import subject_of

from fp4train.errors import UserError
from fp4train.hardware import find_gpu
from fp4train.lab.intervals import Estimate
from fp4train.lab.studies import (
    Finding,
    Judgement,
    RecipeParts,
    Sensitivity,
    SensitivityResult,
    trade_off,
)
from fp4train.lab.studies.parts import CELL, LAYER, NOTHING, OPERAND, WHOLE
from fp4train.lab.studies.summary import policy_file, render
from fp4train.lab.studies.tradeoff import Unit, as_policy
from fp4train.precision import NVFP4

ONE = Estimate(mean=1.0, error=0.0, count=4, freedom=3)
FLOOR = 0.001


def finding(name: str, nmse: float, error: float = 0.0, layers: tuple[float, ...] = ()) -> Finding:
    estimate = Estimate(mean=nmse, error=error, count=4, freedom=3)
    return Finding(
        name=name, nmse=estimate, variance=None, bias2=None, cosine=ONE, loss=ONE, output=None,
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
    trade = trade_off(found, keep=1 / 18, cost=None, gpu=None)
    assert trade.policy.keep == ("blocks.0.attention.wo",) and trade.chosen.macs == pytest.approx(
        1 / 18
    )
    assert trade.chosen.nmse == pytest.approx(FLOOR + 0.041)
    trade = trade_off(found, keep=1.0, cost=None, gpu=None)
    assert set(trade.policy.keep) == set(damage) and trade.chosen.nmse == pytest.approx(FLOOR)
    assert trade_off(found, keep=0.0, cost=None, gpu=None).policy.keep == ()
    nmse = [point.nmse for point in trade.curve]
    assert nmse == sorted(nmse, reverse=True) and nmse[0] == pytest.approx(found.whole.nmse.mean)


def test_what_is_not_told_apart_from_no_damage_is_not_kept(parts: RecipeParts) -> None:
    damage = {"blocks.0.attention.wo": 0.05, "blocks.1.mlp.up": 0.04}
    found = sensitivity(parts, damage, blocks_1_mlp_up=0.02)
    assert trade_off(found, keep=1.0, cost=None, gpu=None).policy.keep == ("blocks.0.attention.wo",)


def test_without_intervals_what_does_damage_is_kept(parts: RecipeParts) -> None:
    found = sensitivity(parts, {"blocks.0.mlp.up": 0.05})
    single = {k: replace(f, nmse=replace(f.nmse, error=None)) for k, f in found.findings.items()}
    assert trade_off(
        replace(found, findings=single), keep=1.0, cost=None, gpu=None
    ).policy.keep == ("blocks.0.mlp.up",)


def test_a_block_of_which_every_layer_is_kept_is_named_once(parts: RecipeParts) -> None:
    block = {name: 0.01 for name in parts.layers if name.startswith("blocks.1.")}
    policy = trade_off(
        sensitivity(parts, {**block, "blocks.0.mlp.up": 0.02}), keep=1.0, cost=None, gpu=None
    ).policy
    assert policy.keep == ("blocks.0.mlp.up", "blocks.1")


def test_the_policy_keeps_exactly_the_chosen_gemms(parts: RecipeParts) -> None:
    kept = [
        Unit(layer=layer, gemms=(gemm,), damage=1.0, clear=True, macs=0.1)
        for layer, gemm in (
            ("blocks.0.mlp.up", "fprop"),
            ("blocks.0.mlp.up", "wgrad"),
            ("blocks.1.mlp.down", "dgrad"),
        )
    ]
    policy = as_policy(parts, kept)
    assert policy.keep == ("blocks.0.mlp.up:fprop+wgrad", "blocks.1.mlp.down:dgrad")
    plans = parts.resolved(parts.recipe, policy)
    high = {(n, g.name) for n in parts.layers for g in plans[n].gemms if not g.operands.quantised}
    assert high == {(unit.layer, gemm) for unit in kept for gemm in unit.gemms}


def test_measured_cells_choose_single_gemms(parts: RecipeParts) -> None:
    found = sensitivity(parts, {"blocks.0.mlp.up": 0.05})
    place = list(parts.layers).index("blocks.1.mlp.up")
    extra = [
        finding(
            f"{CELL}/{layer}/{operand}",
            FLOOR + (0.025 if (layer, operand[:5]) == ("blocks.0.mlp.up", "fprop") else 0),
        )
        for layer in parts.layers
        for operand in parts.operands
        if not operand.startswith("wgrad")
    ]
    for operand in ("wgrad.dy", "wgrad.x"):
        shares = tuple(
            0.01 if i == place and operand == "wgrad.x" else 0.0 for i in range(len(parts.layers))
        )
        extra.append(finding(f"{OPERAND}/{operand}", FLOOR, layers=shares))
    found = replace(found, findings={**found.findings, **{each.name: each for each in extra}})
    assert found.cell("blocks.0.mlp.up", "fprop.w") == pytest.approx(0.025)
    assert found.cell("blocks.1.mlp.up", "wgrad.x") == pytest.approx(0.01)
    trade = trade_off(found, keep=1.0, cost=None, gpu=None)
    assert trade.policy.keep == ("blocks.0.mlp.up:fprop", "blocks.1.mlp.up:wgrad")


def test_a_cost_is_a_time_on_a_gpu(parts: RecipeParts) -> None:
    """On layers this small quantising costs more than it saves: keeping the worst makes the model
    faster.
    """
    found = sensitivity(parts, {"blocks.0.mlp.up": 0.05})
    gpu = find_gpu("B200")
    trade = trade_off(found, keep=0.0, cost=None, gpu=gpu)
    nothing = trade.chosen.time
    assert nothing is not None and nothing > 1
    faster = trade_off(found, keep=None, cost=nothing, gpu=gpu).chosen
    assert faster.time is not None and faster.time < nothing and len(faster.kept) == 1
    assert trade_off(found, keep=None, cost=faster.time, gpu=gpu).chosen == faster
    message = (
        rf"cost=0\.5: on .*B200.* the layers take at least {faster.time:.3f} of their time in BF16"
    )
    with pytest.raises(UserError, match=message):
        trade_off(found, keep=None, cost=0.5, gpu=gpu)


def judged(gain: Estimate) -> Judgement:
    whole = finding(WHOLE, 0.1)
    chosen = finding("chosen", 0.04)
    return Judgement(batches=8, chosen=chosen, everything=whole, gain=gain, over_own=None)


@pytest.mark.parametrize(("error", "told"), [(0.01, True), (0.05, False)])
def test_a_policy_is_judged_by_the_interval_of_what_it_saves_batch_by_batch(
    parts: RecipeParts, error: float, told: bool
) -> None:
    found = sensitivity(parts, {"blocks.0.attention.wo": 0.05, "blocks.1.mlp.up": 0.04})
    trade = trade_off(found, keep=0.15, cost=None, gpu=find_gpu("B200"))
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
    assert "of their time in BF16 on B200: for products of this size quantising costs more" in said


def test_a_study_that_finds_no_layer_asks_for_more_batches_and_has_no_policy(
    parts: RecipeParts,
) -> None:
    found = sensitivity(parts, {})
    trade = trade_off(found, keep=0.15, cost=None, gpu=None)
    report = SensitivityResult.of(parts.subject, found, trade, None)
    assert policy_file(report) is None and report.policy.judged is None
    said = render(report, [])
    assert (
        "no policy: no layer's damage is told apart from the floor" in said
        and "batches=… or budget=…" in said
    )


def test_a_share_too_small_for_any_layer_says_what_the_least_costs(parts: RecipeParts) -> None:
    found = sensitivity(parts, {"blocks.0.mlp.up": 0.05})
    trade = trade_off(found, keep=0.0001, cost=None, gpu=None)
    report = SensitivityResult.of(parts.subject, found, trade, None)
    said = render(report, [])
    assert (
        "no policy: of what is worth keeping blocks.0.mlp.up costs least" in said
        and "allow more" in said
    )
