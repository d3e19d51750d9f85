"""Phases and swaps: the recipe in force at every step."""

from dataclasses import replace
from itertools import pairwise

import pytest

from fp4train.precision import (
    BF16,
    FP16,
    FP32,
    MXFP8,
    NVFP4,
    FP8Delayed,
    Mixed,
    OutlierChannels,
    Phase,
    Residual,
    Swap,
    Timeline,
)

COOLDOWN = Phase(start="cooldown", recipe=BF16(), gemms=["fprop"])
COOLDOWN_ALL = Phase(start="cooldown", recipe=BF16())
HALF = NVFP4().with_high_precision("fprop")


def spans(timeline: Timeline) -> list[tuple[int, int, str]]:
    return [(s.start, s.stop, s.recipe.name) for s in timeline.stretches()]


def test_a_run_without_phases_is_one_stretch() -> None:
    assert spans(Timeline(recipe=NVFP4(), steps=100)) == [(0, 100, "NVFP4")]


def test_the_cooldown_phase_starts_where_the_schedules_cooldown_does() -> None:
    timeline = Timeline(recipe=NVFP4(), steps=100, cooldown=80, phases=[COOLDOWN])
    assert spans(timeline) == [(0, 80, "NVFP4"), (80, 100, "NVFP4 with fprop in BF16")]
    assert timeline.recipe_at(79) == NVFP4()
    assert timeline.recipe_at(80) == HALF
    assert timeline.stretches()[1].reason == "phase cooldown: fprop in BF16"


def test_without_a_cooldown_in_the_schedule_the_phase_never_starts() -> None:
    assert spans(Timeline(recipe=NVFP4(), steps=100, cooldown=None, phases=[COOLDOWN])) == [
        (0, 100, "NVFP4")
    ]


@pytest.mark.parametrize(
    ("start", "step"),
    [(0, 0), (30, 30), (0.25, 25), (0.296, 30), (0.0, 0), (1.0, None), (100, None), (500, None)],
)
def test_a_start_is_a_step_or_a_share_of_the_run(start: float, step: int | None) -> None:
    timeline = Timeline(recipe=NVFP4(), steps=100, phases=[Phase(start=start, recipe=MXFP8())])
    changed = [s.start for s in timeline.stretches() if s.recipe == MXFP8()]
    assert changed == ([] if step is None else [step])


def test_phases_follow_one_another_and_must_be_in_order() -> None:
    first = Phase(start=10, recipe=MXFP8())
    second = Phase(start=0.5, recipe=BF16())
    assert spans(Timeline(recipe=NVFP4(), steps=100, phases=[first, second])) == [
        (0, 10, "NVFP4"),
        (10, 50, "MXFP8"),
        (50, 100, "BF16"),
    ]
    with pytest.raises(ValueError, match=r"phases start at steps \[50, 10\]"):
        Timeline(recipe=NVFP4(), steps=100, phases=[second, first])


def test_a_stretch_in_which_nothing_changes_is_part_of_the_one_before() -> None:
    same = Phase(start=10, recipe=NVFP4())
    assert spans(Timeline(recipe=NVFP4(), steps=100, phases=[same])) == [(0, 100, "NVFP4")]
    assert spans(Timeline(recipe=BF16(), steps=100, cooldown=80, phases=[COOLDOWN])) == [
        (0, 100, "BF16")
    ]


def test_a_swap_replaces_the_recipe_from_its_step() -> None:
    timeline = Timeline(recipe=NVFP4(), steps=100).with_swap(
        Swap(step=40, recipe=MXFP8(), name="mxfp8")
    )
    assert spans(timeline) == [(0, 40, "NVFP4"), (40, 100, "MXFP8")]
    assert timeline.stretches()[1].reason == "swap at step 40"
    again = timeline.with_swap(Swap(step=40, recipe=BF16(), name="bf16"))
    assert spans(again) == [(0, 40, "NVFP4"), (40, 100, "BF16")]


def test_swaps_count_in_the_order_of_their_steps() -> None:
    swaps = [Swap(step=60, recipe=BF16(), name="bf16"), Swap(step=20, recipe=MXFP8(), name="mxfp8")]
    assert spans(Timeline(recipe=NVFP4(), steps=100, swaps=swaps)) == [
        (0, 20, "NVFP4"),
        (20, 60, "MXFP8"),
        (60, 100, "BF16"),
    ]


def test_a_phase_of_single_gemms_refines_what_was_swapped_to() -> None:
    timeline = Timeline(recipe=NVFP4(), steps=100, cooldown=80, phases=[COOLDOWN])
    for step, expected in ((40, (40, 80, "MXFP8")), (90, (90, 100, "MXFP8 with fprop in BF16"))):
        assert expected in spans(timeline.with_swap(Swap(step=step, recipe=MXFP8(), name="mxfp8")))


def test_a_phase_of_the_whole_recipe_yields_to_a_later_swap_and_overrides_an_earlier_one() -> None:
    timeline = Timeline(recipe=NVFP4(), steps=100, cooldown=80, phases=[COOLDOWN_ALL])
    early = timeline.with_swap(Swap(step=40, recipe=MXFP8(), name="mxfp8"))
    late = timeline.with_swap(Swap(step=90, recipe=MXFP8(), name="mxfp8"))
    at_once = timeline.with_swap(Swap(step=80, recipe=MXFP8(), name="mxfp8"))
    assert spans(early) == [(0, 40, "NVFP4"), (40, 80, "MXFP8"), (80, 100, "BF16")]
    assert spans(late) == [(0, 80, "NVFP4"), (80, 90, "BF16"), (90, 100, "MXFP8")]
    assert spans(at_once) == [(0, 80, "NVFP4"), (80, 100, "MXFP8")], "what was asked for last holds"


def test_single_gemms_can_change_to_a_quantised_recipe() -> None:
    timeline = Timeline(
        recipe=NVFP4(),
        steps=100,
        phases=[
            Phase(start=10, recipe=BF16(), gemms=["fprop"]),
            Phase(start=20, recipe=MXFP8(), gemms=["wgrad", "dgrad"]),
            Phase(start=30, recipe=MXFP8(), gemms=["fprop"]),
        ],
    )
    mixed = Mixed(fprop=NVFP4(), dgrad=MXFP8(), wgrad=MXFP8(), high_precision=("fprop",))
    assert timeline.recipe_at(20) == mixed
    assert timeline.recipe_at(20).name == "Mixed(NVFP4/MXFP8/MXFP8) with fprop in BF16"
    assert timeline.recipe_at(30).table() == MXFP8().table()


@pytest.mark.parametrize(
    "fields",
    [
        {"fused_scales": True},
        {"centred": ("x", "dy")},
        {"residual": Residual()},
        {"outliers": OutlierChannels(recipe=MXFP8())},
    ],
    ids=str,
)
def test_what_belongs_to_a_layer_stays_where_single_gemms_of_it_change(fields: dict) -> None:
    mixed = Mixed(fprop=NVFP4(), dgrad=NVFP4(), wgrad=NVFP4(), **fields)
    phase = Phase(start=20, recipe=MXFP8(), gemms=["wgrad"])
    timeline = Timeline(recipe=mixed, steps=100, phases=[phase])
    assert timeline.recipe_at(20) == replace(mixed, wgrad=MXFP8())


def test_a_dequantised_backward_stays_in_the_gemms_that_do_not_change() -> None:
    parts = {"fprop": NVFP4(), "dgrad": NVFP4(), "wgrad": NVFP4()}
    phase = Phase(start=20, recipe=MXFP8(), gemms=["wgrad"])
    for recipe in (Mixed(**parts, backward="dequantised"), NVFP4(backward="dequantised")):
        table = Timeline(recipe=recipe, steps=100, phases=[phase]).recipe_at(20).table()
        assert table["dgrad"] == recipe.table()["dgrad"] and table["dgrad"].dequantised
        assert table["wgrad"] == MXFP8().table()["wgrad"]


def test_fused_scales_end_where_the_weights_of_fprop_have_none_to_share() -> None:
    mixed = Mixed(fprop=NVFP4(), dgrad=NVFP4(), wgrad=NVFP4(), fused_scales=True)
    phase = Phase(start=20, recipe=MXFP8(), gemms=["fprop"])
    for recipe in (mixed, NVFP4(fused_scales=True)):
        before, after = Timeline(recipe=recipe, steps=100, phases=[phase]).stretches()
        assert before.recipe.fused_scales
        assert after.recipe == Mixed(fprop=MXFP8(), dgrad=NVFP4(), wgrad=NVFP4())
        assert after.reason == "phase 20: fprop in MXFP8, without fused scales"


def test_a_phase_that_a_layer_cannot_follow_is_named_with_what_helps() -> None:
    parts = {"fprop": NVFP4(), "dgrad": NVFP4(), "wgrad": NVFP4()}
    outliers = OutlierChannels(recipe=MXFP8())
    for fields, other, why in (
        ({"residual": Residual()}, NVFP4(backward="dequantised"), "residual: Mixed has a dequant"),
        ({"outliers": outliers}, FP8Delayed(), "outliers: delayed scaling has one history"),
    ):
        phase = Phase(start=20, recipe=other, gemms=["wgrad"])
        swap = Swap(step=3, recipe=Mixed(**parts, **fields), name="own")
        with pytest.raises(ValueError, match=why) as refused:
            Timeline(recipe=BF16(), steps=100, phases=[phase], swaps=[swap])
        said = str(refused.value)
        assert said.startswith("phase 20, after swap at step 3: wgrad in ")
        assert "phases=none leaves out all, also with resume=RUN" in said
        whole = replace(phase, gemms=None)
        Timeline(recipe=BF16(), steps=100, phases=[whole], swaps=[swap])


def test_outlier_channels_keep_a_dequantised_backward_where_single_gemms_change() -> None:
    parts = {"fprop": NVFP4(), "dgrad": NVFP4(), "wgrad": NVFP4()}
    mixed = Mixed(**parts, backward="dequantised", outliers=OutlierChannels(recipe=MXFP8()))
    phase = Phase(start=20, recipe=NVFP4(), gemms=["wgrad"])
    changed = Timeline(recipe=mixed, steps=100, phases=[phase]).recipe_at(20)
    before = mixed.of_outliers()
    apart = changed.of_outliers()
    assert before is not None and apart is not None
    assert apart.table()["dgrad"].dequantised and apart.table() == before.table()
    assert changed.table()["dgrad"].dequantised and not changed.table()["wgrad"].dequantised


def test_high_precision_for_single_gemms_means_the_dtype_of_the_run() -> None:
    """The default phases name BF16 and must also work for float16 and float32 runs."""
    for recipe in (NVFP4(dtype="float32"), NVFP4(dtype="float16"), FP16(), FP32()):
        timeline = Timeline(recipe=recipe, steps=100, cooldown=80, phases=[COOLDOWN])
        assert timeline.recipe_at(99).dtype == recipe.dtype
        assert not timeline.recipe_at(99).table()["fprop"].quantised


def test_a_float16_run_cannot_leave_its_dtype() -> None:
    told = "float16 run has a loss scale.* BF16 in a phase or swap has dtype=bfloat16, FP16"
    with pytest.raises(ValueError, match=told):
        Timeline(recipe=FP16(), steps=100, cooldown=80, phases=[COOLDOWN_ALL])
    with pytest.raises(ValueError, match="float16 run has a loss scale"):
        Timeline(recipe=BF16(), steps=100).with_swap(Swap(step=3, recipe=FP16(), name="fp16"))
    assert (
        Timeline(recipe=BF16(), steps=9)
        .with_swap(Swap(step=3, recipe=FP32(), name="fp32"))
        .recipe_at(3)
        == FP32()
    )


def test_gemms_of_another_dtype_are_refused_before_the_run_and_not_at_their_step() -> None:
    with pytest.raises(ValueError, match="dtype"):
        Timeline(
            recipe=NVFP4(),
            steps=100,
            phases=[Phase(start=50, recipe=MXFP8(dtype="float32"), gemms=["fprop"])],
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Phase(start="warmup", recipe=BF16()), "start='warmup'.*cooldown"),
        (lambda: Phase(start=-1, recipe=BF16()), "start=-1"),
        (lambda: Phase(start=1.5, recipe=BF16()), "start=1.5"),
        (lambda: Phase(start=True, recipe=BF16()), "start=True"),
        (lambda: Phase(start=1, recipe=BF16(), gemms=["forward"]), "gemms=.'forward'.*fprop"),
        (lambda: Phase(start=1, recipe=BF16(), gemms=[]), "gemms="),
        (
            lambda: Timeline(recipe=BF16(), steps=9, swaps=[Swap(step=-1, recipe=BF16(), name="")]),
            "steps count from 0",
        ),
    ],
)
def test_a_bad_value_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_stretches_cover_every_step_once() -> None:
    timeline = Timeline(
        recipe=NVFP4(), steps=30, cooldown=20, phases=[Phase(start=7, recipe=MXFP8()), COOLDOWN]
    )
    for swap in (Swap(step=3, recipe=BF16(), name=""), Swap(step=25, recipe=NVFP4(), name="")):
        timeline = timeline.with_swap(swap)
    stretches = timeline.stretches()
    assert [step for s in stretches for step in range(s.start, s.stop)] == list(range(30))
    assert all(
        timeline.recipe_at(step) == s.recipe for s in stretches for step in range(s.start, s.stop)
    )
    assert all(a.recipe != b.recipe for a, b in pairwise(stretches))
