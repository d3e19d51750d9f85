"""Parameter groups of AdamW, the shapes of the schedules, and optimizers that no run can train
with.
"""

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp4train.models.llama import Llama
from fp4train.nn import Experts
from fp4train.optim import WSD, Constant, Constants, Cosine, Schedule, check_built
from fp4train.optim.adamw import AdamW
from fp4train.optim.muon import Muon
from fp4train.optim.sgd import SGD


def llama() -> nn.Module:
    return Llama(width=16, layers=1, heads=2, kv_heads=1, hidden=16).build(vocab_size=8, seq_len=4)


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = llama()
    model.register_parameter("bias", nn.Parameter(torch.zeros(3)))
    groups = AdamW(weight_decay=0.2).build(model).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    decay = {names[id(p)]: g["weight_decay"] for g in groups for p in g["params"]}
    assert decay == {name: 0.2 if p.dim() >= 2 else 0.0 for name, p in model.named_parameters()}
    assert sorted(set(decay.values())) == [0.0, 0.2]


def test_the_biases_of_experts_are_no_matrices() -> None:
    groups = AdamW(weight_decay=0.2).build(Experts(4, 8, 16, bias=True)).param_groups
    decay = {tuple(p.shape): g["weight_decay"] for g in groups for p in g["params"]}
    assert decay == {(4, 16, 8): 0.2, (4, 16): 0.0}


def test_a_tied_weight_is_updated_once() -> None:
    model = llama()
    parameters = [p for g in AdamW().build(model).param_groups for p in g["params"]]
    assert len(parameters) == len({id(p) for p in parameters}) == len(list(model.parameters()))


def test_the_constants_reach_torch() -> None:
    optimizer = AdamW(lr=0.5, betas=(0.8, 0.9), eps=1e-4).build(llama())
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (
            0.5,
            (0.8, 0.9),
            1e-4,
            True,
        )
    assert AdamW(betas=[0.8, 0.9]) == AdamW(betas=(0.8, 0.9)), "YAML knows lists only"  # type: ignore[arg-type]


def test_frozen_parameters_are_left_out_and_all_frozen_is_an_error() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    assert [p for g in AdamW().build(model).param_groups for p in g["params"]] == [model.weight]
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        AdamW().build(model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"betas": (0.9,)}, "betas="),
        ({"eps": 0.0}, "eps=0.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"clip": 0.0}, "clip=0.0"),
    ],
)
def test_a_bad_constant_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(**values)  # type: ignore[arg-type]


def factors(schedule: Schedule, steps: int = 100) -> list[float]:
    return [schedule.factor(step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    "schedule", [Constant(), Cosine(floor=0.1), WSD(), WSD(decay="linear"), WSD(decay="cosine")]
)
def test_warm_up_is_a_straight_line_that_begins_above_zero_and_ends_at_the_peak(
    schedule: Schedule,
) -> None:
    found = factors(schedule)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(found) == 1.0
    assert min(found) > 0, "no step is spent at a learning rate of zero"


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "schedule",
    [Constant(), Cosine(), WSD(), WSD(warmup=0.5, cooldown=0.9), WSD(warmup=0, cooldown=0)],
)
def test_the_shortest_runs_have_a_learning_rate(schedule: Schedule, steps: int) -> None:
    assert all(0 < f <= 1 for f in factors(schedule, steps))


def test_constant_stays_at_the_peak() -> None:
    assert set(factors(Constant())[5:]) == {1.0}


def test_the_half_cosine_begins_where_the_warm_up_ends() -> None:
    schedule = Cosine(warmup=20)
    assert schedule.factor(20, 120) == 1.0
    assert schedule.factor(70, 120) == pytest.approx(0.5)


def test_cosine_is_half_way_in_the_middle_and_ends_near_the_floor() -> None:
    schedule = Cosine(warmup=0, floor=0.1)
    assert schedule.factor(0, 100) == 1.0
    assert schedule.factor(50, 100) == pytest.approx(0.55)
    assert schedule.factor(99, 100) == pytest.approx(0.1, abs=1e-3)
    assert sum(factors(schedule, 1000)) / 1000 == pytest.approx(0.55, abs=1e-3), (
        "the mean of half a cosine"
    )


@pytest.mark.parametrize(
    ("decay", "mean", "half"),
    [("linear", 1 / 2, 0.5), ("cosine", 1 / 2, 0.5), ("1-sqrt", 1 / 3, 1 - math.sqrt(0.5))],
)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_wsd_is_stable_until_the_cooldown_whose_shape_has_the_integral_it_should(
    decay: str, mean: float, half: float, floor: float
) -> None:
    schedule = WSD(warmup=0, cooldown=0.5, decay=decay, floor=floor)
    steps = 4000
    found = factors(schedule, steps)
    assert set(found[: steps // 2]) == {1.0}
    assert sum(found[steps // 2 :]) / (steps // 2) == pytest.approx(
        floor + (1 - floor) * mean, abs=2e-3
    )
    assert found[3 * steps // 4 - 1] == pytest.approx(floor + (1 - floor) * half, abs=2e-3)
    assert all(a > b for a, b in zip(found[steps // 2 :], found[steps // 2 + 1 :], strict=False))
    assert found[-1] == pytest.approx(floor, abs=2e-3)


def test_shares_and_steps_mean_the_same() -> None:
    assert factors(WSD(warmup=0.1, cooldown=0.3)) == factors(WSD(warmup=10, cooldown=30))
    assert WSD(cooldown=1.0).cooldown_start(100) == 5, "after the warm-up at the earliest"
    assert factors(WSD(warmup=1000)) == factors(WSD(warmup=1.0)), (
        "a warm-up longer than the run fills it"
    )


def test_the_cooldown_starts_where_phases_are_told_it_does() -> None:
    schedule = WSD(cooldown=0.2)
    start = schedule.cooldown_start(100)
    assert start == 80
    assert schedule.factor(start - 1, 100) == 1.0 > schedule.factor(start, 100)
    late = WSD(warmup=0.5, cooldown=0.9)
    assert late.cooldown_start(100) == 50
    assert WSD(cooldown=0).cooldown_start(100) == 100, "none within the run"
    assert Constant().cooldown_start(100) is None
    assert Cosine().cooldown_start(100) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WSD(cooldown=1.5), r"schedule.cooldown=1.5 must be .*share"),
        (lambda: WSD(cooldown=-1), "schedule.cooldown=-1"),
        (lambda: WSD(cooldown=True), "schedule.cooldown=True"),
        (lambda: WSD(cooldown="5%"), "schedule.cooldown='5%'"),
        (lambda: WSD(decay="exp"), "schedule.decay='exp' is not one of linear, cosine, 1-sqrt"),
        (lambda: Cosine(warmup=math.nan), "schedule.warmup=nan"),
        (lambda: Cosine(floor=1.5), "schedule.floor=1.5"),
        (lambda: Constant(warmup=-0.1), "schedule.warmup=-0.1"),
    ],
)
def test_a_bad_value_names_the_field(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = llama()
    optimizer = Muon(weight_decay=0.2).build(model)
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for g in optimizer.param_groups if "ns_steps" in g for p in g["params"]}
    assert of_muon == {
        n for n, p in model.named_parameters() if n.startswith("blocks.") and p.dim() == 2
    }
    assert {names[id(p)] for g in optimizer.param_groups for p in g["params"]} == set(
        names.values()
    )
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.2, 0.0], (
        "muon, embedding, norms"
    )


def test_muons_step_is_orthogonal_and_of_the_size_of_adamws() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    optimizer = Muon(lr=1.0, weight_decay=0.0).build(model)
    before = model[0].weight.detach().clone()
    model[0].weight.grad = torch.randn(64, 64)
    optimizer.step()
    sizes = torch.linalg.svdvals(before - model[0].weight.detach()) / (0.2 * 64**0.5)
    assert 0.5 < float(sizes.median()) < float(sizes.max()) < 1.4


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_the_parts_of_muon_keep_one_state_and_the_rate_of_the_schedule_after_a_restore(
    moments: str,
) -> None:
    def trained(
        state: dict[str, object] | None, steps: int
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        optimizer = Muon(moments=moments).build(model)
        if state is not None:
            model.load_state_dict(state["model"])  # type: ignore[arg-type]
            optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.zero_grad()
            model(torch.arange(8)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(None, 2)
    kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    whole, _ = trained(None, 4)
    resumed, again = trained(kept, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)
    )
    assert len(again.state_dict()["state"]) == len(list(model.parameters()))


def test_sgd_decays_matrices_only_and_its_constants_reach_torch() -> None:
    groups = SGD(lr=0.5, momentum=0.8, nesterov=True, weight_decay=0.1).build(llama()).param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(
        (g["lr"], g["momentum"], g["nesterov"], g["fused"]) == (0.5, 0.8, True, True)
        for g in groups
    )


def test_sgd_has_no_momentum_of_a_first_step_that_is_skipped() -> None:
    """torch's would be memory that nothing wrote."""
    model = nn.Linear(64, 64)
    optimizer = SGD().build(model)
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(2, 64)).sum().backward()
    written = [torch.full((64, 64), 7.0) for _ in range(50)]
    del written
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for state in optimizer.state.values():
        assert not state["momentum_buffer"].any()


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_takes_the_steps_of_torch(nesterov: bool) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(32, 32)
    theirs = copy.deepcopy(ours)
    optimizers = (
        SGD(lr=0.5, momentum=0.8, nesterov=nesterov).build(ours),
        torch.optim.SGD(theirs.parameters(), lr=0.5, momentum=0.8, nesterov=nesterov, fused=True),
    )
    for _ in range(3):
        x = torch.randn(4, 32)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SGD, {"lr": -1.0}, "lr=-1.0"),
        (SGD, {"momentum": 1.0}, r"momentum=1.0 must lie in \[0, 1\)"),
        (SGD, {"momentum": 0.0, "nesterov": True}, "nesterov=true needs"),
        (Muon, {"momentum": -0.1}, "momentum=-0.1"),
        (Muon, {"iterations": 0}, "iterations=0"),
        (Muon, {"betas": (0.9,)}, "betas="),
    ],
)
def test_constants_of_the_others_that_make_no_sense(
    kind: type[Constants], values: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)  # type: ignore[arg-type]


def test_muon_without_matrices_in_blocks_says_what_to_take() -> None:
    with pytest.raises(
        ValueError,
        match="optim=muon needs linear layers in the blocks of Embedding; take optim=adamw",
    ):
        Muon().build(nn.Embedding(4, 4))


@pytest.mark.parametrize("size", range(16, 200, 16))
def test_adamw_updates_two_parts_of_a_multiple_of_16_elements_as_it_does_the_whole(
    size: int,
) -> None:
    """On a CPU its kernel rounds otherwise what does not fill a vector: docs/scale.md says when
    shards are one rank.
    """
    whole = torch.randn(2 * size, generator=torch.Generator().manual_seed(size))
    ends = []
    for parts in ([whole], [whole[:size], whole[size:]]):
        own = [torch.nn.Parameter(part.clone()) for part in parts]
        optimizer = torch.optim.AdamW(own, lr=1e-3, weight_decay=0.1, fused=True)
        for step in range(5):
            gradients = torch.randn(2 * size, generator=torch.Generator().manual_seed(step)).split(
                own[0].numel()
            )
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        held = [
            (p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
            for p in own
        ]
        ends.append(torch.cat([torch.stack(each) for each in held], 1))
    assert torch.equal(*ends)


FIT_FOR_NO_RUN: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "no optimizer": (lambda model: None, "an object of NoneType; it must return a torch.optim"),
    "a closure": (lambda model: torch.optim.LBFGS(model.parameters()), "that needs no closure"),
    "foreign parameters": (
        lambda model: torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0),
        "a tensor [3] that is no parameter of the model: give it those of model.parameters()",
    ),
}


@pytest.mark.parametrize(("built", "message"), FIT_FOR_NO_RUN.values(), ids=FIT_FOR_NO_RUN)
def test_what_no_run_can_train_with_is_refused(
    built: Callable[[nn.Module], object], message: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        check_built(built(model), model, "House")
    assert str(refused.value).startswith("House.build gave ")


def test_all_optimizers_of_fp4train_are_fit_for_a_run() -> None:
    model = llama()
    for optim in (AdamW(), AdamW(moments="bfloat16"), Muon(), SGD()):
        check_built(optim.build(model), model, type(optim).__name__)
