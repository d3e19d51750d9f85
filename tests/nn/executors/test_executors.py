"""The choice of an executor, what it answers for CUDA graphs, and the states that executors carry
from step to step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from forked import forked
from torch import Tensor

from fp4train.backends import DataRanks, LayerState
from fp4train.backends.te import TEExecutor, TEExperts
from fp4train.hardware import Device
from fp4train.nn import DelayedScaling, LayerShard, Linear
from fp4train.nn.engine import EAGER, torch_autocasts
from fp4train.nn.executors import (
    STATES,
    BackendExperts,
    BackendLayer,
    ChannelNorms,
    ChannelParts,
    CutGemms,
    Gemms,
    GroupGemms,
    TorchLayer,
    executor_class,
    join_states,
    make_executor,
    saved_tensor,
)
from fp4train.nn.layer_shard import default_context
from fp4train.precision import (
    BF16,
    MXFP8,
    NVFP4,
    FP8Delayed,
    Layer,
    LayerPlan,
    OutlierChannels,
    Recipe,
    resolve,
)
from fp4train.quantize import RunStep

LAYER = Layer(name="up", in_features=64, out_features=64, block=0, blocks=1)
CUT = replace(LAYER, cut="out", parts=2)
EXPERTS = replace(LAYER, experts=4)
OUTLIERS = NVFP4(outliers=OutlierChannels(recipe=MXFP8()))


def plan(recipe: Recipe, layer: Layer = LAYER, backend: str | None = None) -> LayerPlan:
    """The plan on a CPU; `backend` takes the place of what it chose there."""
    found = resolve(layer, recipe, None, "auto", Device(type="cpu"))
    if backend is None:
        return found
    return replace(found, **{gemm.name: replace(gemm, backend=backend) for gemm in found.gemms})


def test_a_device_type_that_is_registered_later_has_its_own_autocast() -> None:
    """The answers that are kept: "meta" never has one, and a name that torch does not know yet is
    asked again.
    """

    def program() -> None:
        assert not torch_autocasts("meta") and not torch_autocasts("privateuseone")
        with pytest.raises(RuntimeError, match="Expected one of"):
            torch_autocasts("npu")
        torch.utils.rename_privateuse1_backend("npu")
        assert not torch_autocasts("npu")
        torch.set_autocast_enabled("npu", True)
        assert torch_autocasts("npu") and torch_autocasts("privateuseone")

    assert forked(program) == 0


CHOSEN = {
    "torch": (plan(BF16()), TorchLayer),
    "gemms": (plan(NVFP4()), Gemms),
    "channels": (plan(OUTLIERS), ChannelParts),
    "a backend": (plan(NVFP4(), backend="te"), BackendLayer),
    "cut": (plan(NVFP4(), CUT), CutGemms),
    "cut in high precision": (plan(BF16(), CUT), CutGemms),
    "experts": (plan(NVFP4(), EXPERTS), GroupGemms),
    "cut experts": (plan(BF16(), replace(EXPERTS, cut="experts", parts=2)), GroupGemms),
    "experts on a backend": (plan(NVFP4(), EXPERTS, backend="te"), BackendExperts),
}


class Peers:
    """Two ranks, as far as an executor asks for them when it is made."""

    size = 2
    rank = 0

    def sum(self, x: Tensor) -> Tensor:
        return x

    sum_rows = sum


@pytest.mark.parametrize(("planned", "kind"), CHOSEN.values(), ids=CHOSEN)
def test_what_answers_for_a_plan_is_what_runs_it(planned: LayerPlan, kind: type[object]) -> None:
    cut = planned.layer.cut
    shard = None if cut is None else LayerShard(tensor=Peers(), cut=cut)  # type: ignore[arg-type]
    assert executor_class(planned) is kind
    assert type(make_executor(planned, "cpu", shard)) is kind


def test_on_the_meta_device_shapes_are_enough_and_cuts_stay() -> None:
    made = {
        name: type(make_executor(each, "meta"))
        for name, (each, _) in CHOSEN.items()
        if each.layer.cut is None
    }
    groups = {name: kind for name, kind in made.items() if "experts" in name}
    assert set(groups.values()) == {GroupGemms} and set(made.values()) - {GroupGemms} == {
        TorchLayer
    }
    shard = LayerShard(tensor=Peers(), cut="out")  # type: ignore[arg-type]
    assert type(make_executor(CHOSEN["cut"][0], "meta", shard)) is CutGemms


ROWS = "how many rows each of its 4 experts has"
REASONS: list[tuple[LayerPlan, str | None]] = [
    (plan(FP8Delayed()), None),
    (
        plan(FP8Delayed(), backend="te"),
        "delayed scaling on backend=te updates its histories on the host",
    ),
    (plan(FP8Delayed(), EXPERTS), ROWS),
    (plan(NVFP4(), EXPERTS, backend="te"), ROWS),
    (plan(OUTLIERS), "the host counts the steps"),
    (plan(NVFP4(), CUT), None),
    (plan(BF16(), CUT), None),
]


@pytest.mark.parametrize(("planned", "reason"), REASONS)
def test_an_executor_says_why_no_graph_holds_it(planned: LayerPlan, reason: str | None) -> None:
    answer = executor_class(planned).why_no_graph(planned)
    assert answer is None if reason is None else reason in str(answer)


def test_a_cut_layer_outside_of_contexts_runs_in_the_dtype_of_its_input_and_outside_of_graphs() -> (
    None
):
    made = layer()
    assert made.executor_now(torch.device("cpu"), torch.float32)[0] is None
    assert made.handle.route().kind == "plain"
    made.layer_shard = LayerShard(tensor=Peers(), cut="out")  # type: ignore[arg-type]
    made.rename(replace(made.layer, cut="out", parts=2), "auto")
    made.default_context = default_context
    executor, now = made.executor_now(torch.device("cpu"), torch.float16)
    assert type(executor) is CutGemms and executor.dtype == torch.float16
    assert now.context is default_context(torch.float16), (
        "the call has the context that chose its executor"
    )
    assert made.handle.route() == EAGER


class All:
    """Ranks that say which reductions they were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def largest(self, x: Tensor) -> Tensor:
        self.asked.append("largest")
        return x

    def summed_over_data(self, x: Tensor) -> Tensor:
        self.asked.append("sum")
        return x


class Seen(LayerState):
    """A state that an executor of somebody else might bring."""

    kind = "seen"
    tensors: ClassVar = {"tokens": (torch.int64, 0, True)}

    def __init__(self) -> None:
        self.tokens = torch.tensor(0)

    def state(self) -> dict[str, Tensor]:
        return {"tokens": self.tokens}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.tokens = state["tokens"]

    @staticmethod
    def join(each: Sequence["Seen"], ranks: DataRanks) -> None:
        for one in each:
            one.tokens = ranks.summed_over_data(one.tokens) * 2


def layer() -> Linear:
    return Linear(16, 16)


def test_a_state_says_itself_how_it_is_made_saved_checked_and_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert saved_tensor("seen.tokens") is None, "before anything needs such a state"
    monkeypatch.setitem(STATES, "seen", Seen)  # type: ignore[arg-type]  # as a line in EXECUTORS does
    assert saved_tensor("seen.tokens") == (torch.int64, 0, True)
    made = layer()
    made.joined = True
    scaling = {"history.x": torch.ones(4), "used.x": torch.tensor(2.0)}
    made.load_scaling_state({"seen.tokens": torch.tensor(3), **scaling})
    assert made.states["seen"].joined and set(made.states) == {"seen", "scaling"}
    join_states([made], All())
    saved = made.scaling_state()
    assert set(saved) == {"seen.tokens", *scaling} and saved["seen.tokens"] == 6
    assert all(torch.equal(saved[name], each) for name, each in scaling.items())


def test_histories_are_joined_before_norms_whatever_the_order_of_the_layers() -> None:
    x = torch.ones(4, 16)
    first = layer()
    second = layer()
    ranks = All()
    norms = ChannelNorms()
    scaling = DelayedScaling()
    first.states["outliers"] = norms
    second.states["scaling"] = scaling
    norms.record(x, RunStep(0, 0))
    scaling.load_state({"history.x": torch.ones(4), "used.x": torch.ones(())})
    join_states([first, second], ranks)
    assert ranks.asked == ["largest", "sum"]


@pytest.mark.parametrize("kernels", [TEExecutor, TEExperts])
def test_a_backends_kernels_are_a_state_that_its_region_joins(
    kernels: type[TEExecutor] | type[TEExperts],
) -> None:
    made = layer()
    ranks = All()
    made.states["te"] = kernels(name="up")
    made.states["te"].load_state({"scale_fwd": torch.ones(2)})
    join_states([made], ranks)
    assert not ranks.asked
    assert set(made.scaling_state()) == ({"te.scale_fwd"} if kernels is TEExecutor else set())
    assert saved_tensor("te.scale_fwd") is None
