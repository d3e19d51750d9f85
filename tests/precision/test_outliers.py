"""Outlier channels as a property of recipes: what is refused, what the plan says of them, and from
which step on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_layers import own_channels
from torch import nn

import fp4train as f4
from fp4train.files import Folder
from fp4train.hardware import Device, find_gpu
from fp4train.lab.costs.rows import layer_costs
from fp4train.nn import Linear
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    Custom,
    FP8Delayed,
    Layer,
    LayerPolicy,
    Mixed,
    Operands,
    OutlierChannels,
    Plan,
    Recipe,
    Swap,
    TetraJetV2,
    TetraJetV2Outliers,
    Timeline,
    resolve,
    wire_form,
)
from fp4train.precision.plan import plan
from fp4train.quantize import Hadamard, QuantSpec
from fp4train.run.checks import never_chosen
from fp4train.run.record.journal import Journal, read_journal
from fp4train.run.step_graph import check_plan

CPU = Device.of(torch.device("cpu"))
RECIPE = NVFP4(outliers=OutlierChannels(recipe=MXFP8(), start=10, steps=5))
LAYER = Layer(name="blocks.0.up", in_features=320, out_features=64, block=0, blocks=1)


def channels(**values: Any) -> OutlierChannels:
    return OutlierChannels(**{"recipe": MXFP8(), **values})


TURNED = QuantSpec(hadamard=Hadamard())
TRANSFORMED = Custom(fprop=Operands(first=TURNED, second=TURNED))
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "all channels": (
        lambda: channels(share=1.0),
        ValueError,
        "outliers.share=1.0 must lie between 0 and 1",
    ),
    "no channel": (
        lambda: channels(share=0),
        ValueError,
        "outliers.share=0 must lie between 0 and 1",
    ),
    "a word for a share": (
        lambda: channels(share="10 %"),
        TypeError,
        "outliers.share='10 %' must be a number",
    ),
    "no recorded step": (
        lambda: channels(steps=0),
        ValueError,
        "outliers.steps=0 must be at least 1",
    ),
    "half a step": (
        lambda: channels(start=0.5),
        TypeError,
        "outliers.start=0.5 must be a whole number",
    ),
    "a share for the channels": (
        lambda: NVFP4(outliers=0.1),
        TypeError,
        "must be OutlierChannels with a recipe",
    ),  # type: ignore[arg-type]
    "a name for their recipe": (
        lambda: NVFP4(outliers=channels(recipe="mxfp8")),
        TypeError,
        "must be OutlierChannels with a recipe",
    ),
    "outliers of outliers": (
        lambda: NVFP4(outliers=channels(recipe=RECIPE)),
        ValueError,
        "no outlier channels of",
    ),
    "nothing quantised": (lambda: BF16(outliers=channels()), ValueError, "BF16 quantises nothing"),
    "delayed scaling": (
        lambda: FP8Delayed(outliers=channels()),
        ValueError,
        "delayed scaling has one history",
    ),
    "delayed scaling of the outliers": (
        lambda: NVFP4(outliers=channels(recipe=FP8Delayed())),
        ValueError,
        "delayed scaling has one history",
    ),
    "a dequantised backward of transformed outliers": (
        lambda: NVFP4(backward="dequantised", outliers=channels(recipe=TRANSFORMED)),
        ValueError,
        "outliers.recipe: Custom: w of dgrad: dequantised=True",
    ),
    "a part of one GEMM": (
        lambda: Mixed(fprop=RECIPE),
        ValueError,
        "outlier channels, which belong to the three",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_is_refused_by_name(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_outlier_channels_have_the_backward_pass_that_their_recipe_names() -> None:
    part = MXFP8(backward="dequantised")
    apart = NVFP4(outliers=channels(recipe=part)).of_outliers()
    assert apart is not None and apart.table() == part.table()


@pytest.mark.parametrize(
    ("features", "multiple", "count"),
    [
        (320, 32, 32),
        (321, 32, 64),
        (128, 32, 32),
        (128, 128, 0),
        (32, 32, 0),
        (1024, 128, 128),
        (70, 1, 7),
    ],
)
def test_the_share_is_rounded_up_to_multiples_and_leaves_other_channels(
    features: int, multiple: int, count: int
) -> None:
    assert channels(multiple=multiple).count(features) == count


def test_gemms_in_high_precision_are_so_in_both_parts() -> None:
    recipe = RECIPE.with_high_precision("fprop").of_outliers()
    assert (
        recipe is not None and not recipe.table().fprop.quantised and recipe.table().wgrad.quantised
    )
    half = NVFP4(dtype="float32", outliers=channels()).of_outliers()
    assert half is not None and half.dtype == "float32"
    assert NVFP4().of_outliers() is None


def test_a_recipe_shows_both_tables() -> None:
    shown = str(TetraJetV2(outliers=OutlierChannels(recipe=TetraJetV2Outliers())))
    assert "outlier channels, 10% of the input channels, chosen in steps 500–549" in shown
    assert "E4M3     1×32 along tokens  E8M0 rceil" in shown and "FP32 1×128" in shown


def stretches(recipe: Recipe, steps: int, *swaps: Swap) -> list[tuple[int, int, bool | None]]:
    found = Timeline(recipe=recipe, steps=steps, swaps=swaps).stretches()
    return [(each.start, each.stop, each.split) for each in found]


def test_the_timeline_counts_recorded_steps_through_swaps() -> None:
    away = Swap(step=12, recipe=BF16(), name="bf16")
    back = Swap(step=40, recipe=RECIPE, name="nvfp4")
    assert stretches(RECIPE, 100) == [(0, 15, False), (15, 100, True)]
    assert stretches(RECIPE, 12) == [(0, 12, False)]
    assert stretches(NVFP4(), 100) == [(0, 100, None)]
    assert stretches(RECIPE, 100, away, back) == [
        (0, 12, False),
        (12, 40, None),
        (40, 43, False),
        (43, 100, True),
    ]
    late = Swap(step=50, recipe=RECIPE, name="nvfp4")
    assert stretches(BF16(), 100, late) == [(0, 50, None), (50, 55, False), (55, 100, True)]
    gone = Swap(step=20, recipe=BF16(), name="bf16")
    assert stretches(RECIPE, 100, gone, back)[-1] == (40, 100, True), "what was chosen stays chosen"


def small(**values: Any) -> Plan:
    model = nn.Sequential(nn.Linear(320, 64), nn.Linear(32, 64))
    return plan(model, RECIPE, steps=100, tokens=128, **values)


def test_the_plan_says_what_is_multiplied_apart_from_which_step_on() -> None:
    rows = [(r.start, r.layer.name, r.gemm, r.size, r.elements, r.backend) for r in small().rows]
    assert rows[:3] == [
        (0, "0", "fprop", (128, 64, 320), "E2M1·E2M1", "emulate"),
        (0, "0", "dgrad", (128, 320, 64), "E2M1·E2M1", "emulate"),
        (0, "0", "wgrad", (64, 320, 128), "E2M1·E2M1", "emulate"),
    ]
    assert rows[6:12] == [
        (15, "0", "fprop", (128, 64, 288), "E2M1·E2M1", "emulate"),
        (15, "0", "dgrad", (128, 288, 64), "E2M1·E2M1", "emulate"),
        (15, "0", "wgrad", (64, 288, 128), "E2M1·E2M1", "emulate"),
        (15, "0", "fprop", (128, 64, 32), "E4M3·E4M3", "emulate"),
        (15, "0", "dgrad", (128, 32, 64), "E4M3·E4M3", "emulate"),
        (15, "0", "wgrad", (64, 32, 128), "E4M3·E4M3", "emulate"),
    ]
    by_start = {start: sum(r.macs for r in small().rows if r.start == start) for start in (0, 15)}
    assert by_start[0] == by_start[15], "the multiply-adds are the same, in other formats"
    assert small().shares(0) == {"E2M1·E2M1": 1.0} and small().shares(15)[
        "E4M3·E4M3"
    ] == pytest.approx(32 / 352)
    shown = str(small())
    assert (
        "outlier channels: 32 of 320, MXFP8" in shown and "multiples of 32 leave no other" in shown
    )
    assert (
        "outlier channels not chosen yet" in shown
        and "outlier channels are multiplied apart)" in shown
    )


def test_the_record_of_a_run_keeps_both_parts(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as folder:
        written = Journal(folder, None)
        written.add("start", 0, small())
        written.write()
    (record,) = read_journal(tmp_path)
    assert [len(each.rows) for each in record.stretches] == [6, 9]
    assert record.stretches[1].shares == small().shares(15)


@pytest.mark.parametrize("backend", ["te", "native"])
def test_backends_that_multiply_whole_layers_are_refused_with_the_reason(backend: str) -> None:
    gpu = Device.elsewhere(find_gpu("B200"))
    assert {g.backend for g in resolve(LAYER, NVFP4(), None, "auto", gpu).gemms} != {"emulate"}
    with pytest.raises(
        ValueError, match="outlier channels are multiplied apart, which emulate and reference do"
    ):
        resolve(LAYER, RECIPE, None, backend, gpu)
    found = resolve(LAYER, RECIPE, None, "auto", gpu)
    assert {g.backend for g in found.gemms} == {"emulate"} and "multiplied apart" in found.fprop.why


def test_the_cost_is_that_of_both_parts() -> None:
    gpu = find_gpu("B200")
    rows = layer_costs(
        resolve(LAYER, RECIPE, None, "auto", Device.elsewhere(gpu)).split_channels(), gpu, 4096
    )
    assert [row.size[2] for row in rows if row.gemm_name == "fprop"] == [288, 32]
    assert all(row.emulated for row in rows)


def test_shards_send_the_weight_in_bf16_and_say_why() -> None:
    form = wire_form(resolve(LAYER, RECIPE, None, "auto", CPU), 2, "recipe")
    assert (
        form.dtype == torch.bfloat16
        and form.rounds
        and form.why == "its outlier channels are quantised apart"
    )
    assert wire_form(resolve(LAYER, NVFP4(), None, "auto", CPU), 2, "recipe").why is None


def test_layers_that_are_cut_and_recorded_steps_are_refused() -> None:
    cut = Layer(
        name="blocks.0.up", in_features=320, out_features=64, block=0, blocks=1, cut="in", parts=2
    )
    with pytest.raises(ValueError, match=r"parallel.tp cuts blocks.0.up: use parallel.tp=1"):
        resolve(cut, RECIPE, None, "auto", CPU)
    with pytest.raises(
        ValueError, match=r"cuda_graph=true cannot record.*the host counts the steps"
    ):
        check_plan(small())
    with pytest.raises(ValueError, match=r"parallel.pp"):
        small().check_ranks(stages=2)
    small().check_ranks(stages=1)
    narrow = plan(nn.Sequential(nn.Linear(32, 64)), RECIPE, steps=100)
    with pytest.raises(
        ValueError,
        match=r"leaves no other channel of any layer \(the widest has 32 input channels\)",
    ):
        narrow.check_ranks(stages=1)


def test_a_run_that_ends_before_the_choice_is_told() -> None:
    assert never_chosen(small()) is None
    short = plan(nn.Sequential(nn.Linear(320, 64)), RECIPE, steps=12)
    assert "5 steps are recorded from step 10 on" in str(never_chosen(short))


def test_a_layer_that_a_policy_keeps_has_none() -> None:
    policy = LayerPolicy(last=0, keep=["0"])
    kept = (
        plan(nn.Sequential(nn.Linear(320, 64), nn.Linear(320, 64)), RECIPE, policy, steps=100)
        .stretches[-1]
        .layers
    )
    assert [each.outliers is None for each in kept.values()] == [True, False]


def test_layers_do_what_the_plan_says_at_every_step() -> None:
    model = f4.convert(nn.Sequential(nn.Linear(96, 96), nn.Linear(32, 32)))
    timeline = Timeline(
        recipe=RECIPE,
        steps=40,
        swaps=(
            Swap(step=12, recipe=BF16(), name="bf16"),
            Swap(step=20, recipe=RECIPE, name="nvfp4"),
        ),
    )
    resolved = f4.precision.plan.make_plan(
        f4.precision.layers.find_layers(model).values(), timeline, None, tokens=32, device=CPU
    )
    for step in range(30):
        for module in model:
            assert isinstance(module, Linear)
            with f4.autocast(timeline.recipe_at(step), step=step):
                module(torch.randn(32, module.in_features)).sum().backward()
            expected = resolved.at(step).layers[module.layer.name].outliers is not None
            ran = (
                timeline.recipe_at(step).quantised
                and len(own_channels(module)) < module.in_features
            )
            assert ran == expected, (step, module.layer.name)


def test_a_table_of_ones_own_can_have_outlier_channels() -> None:
    table = NVFP4().table()
    own = Custom(
        label="own",
        fprop=table.fprop,
        dgrad=table.dgrad,
        wgrad=table.wgrad,
        outliers=channels(start=0, steps=1),
    )
    layer = f4.convert(nn.Linear(96, 32))
    for step in range(2):
        with f4.autocast(own, step=step):
            layer(torch.randn(8, 96)).sum().backward()
    assert isinstance(layer, Linear) and len(own_channels(layer)) < 96
