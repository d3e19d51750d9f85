"""OsciReset against its algorithm written in numpy, and what it leaves alone."""

from functools import partial
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch
from torch import nn

import fp4train as f4
from fp4train.nn import Experts
from fp4train.optim import OscillationReset
from fp4train.optim.oscillation import JUMPED, MOVED, SEEN, Paths, follow, values_of, why_not
from fp4train.precision import NVFP4, TetraJetV2
from fp4train.quantize import Hadamard, QuantSpec, quantize
from fp4train.run.state.oscillation import watched

SPEC = QuantSpec(global_scale="block")
QUANTISED = partial(values_of, spec=SPEC)
SETTINGS = OscillationReset(every=10, watch=6, ratio=8.0, start=10)
GOOD = torch.tensor(False)


def walk(steps: int) -> list[torch.Tensor]:
    """A weight [4, 256] over steps: most entries drift or rest; some hop across a threshold of
    their grid by little.
    """
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(4, 256, generator=generator)
    # the amax of every block: it rests, and with it all thresholds, 0.25, 0.75, 1.25, …
    first[:, ::16] = 6.0
    drift = torch.randn(4, 256, generator=generator).mul_(0.02)
    drift[:, ::16] = 0.0
    found = []
    for step in range(steps):
        w = first + step * drift
        w[:, 3::16] = 0.25 + (0.002 if step % 2 else -0.002)
        w[:, 5::16] = -2.5 + (0.01 if step % 3 else -0.01)
        w[:, 7::16] = 1.0  # does not move
        found.append(w)
    return found


def test_it_equals_the_algorithm_written_down_independently() -> None:
    weights = walk(17)
    own = nn.Parameter(weights[9].clone())
    paths: Paths = {}
    share = None
    for done in range(10, 17):  # the watch begins after step 10 and ends after step 16
        own.data.copy_(weights[done])
        share = follow(SETTINGS, paths, [("w", own, QUANTISED)], done, GOOD)
        assert (share is None) == (done < 16)
    path_w = np.zeros((4, 256), np.float32)
    path_q = np.zeros((4, 256), np.float32)
    q = [quantize(w, SPEC).dequantize().numpy() for w in weights]
    w = [each.numpy() for each in weights]
    for t in range(11, 17):
        path_w += np.abs(w[t] - w[t - 1])
        path_q += np.abs(q[t] - q[t - 1])
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(path_w == 0, 0, path_q / path_w)
    wanted = np.where(ratio >= 8, q[16], w[16])
    assert np.array_equal(own.detach().numpy(), wanted)
    assert share == pytest.approx((ratio >= 8).mean())
    assert (
        (ratio >= 8)[:, 3::16].all()
        and (ratio >= 8)[:, 5::16].all()
        and not (ratio >= 8)[:, 7::16].any()
    )
    assert not paths, "what was watched is not kept until the next watch"


def test_a_reset_weight_lies_on_its_value_and_values_stay_as_they_were() -> None:
    w = walk(3)[2]
    assert torch.equal(values_of(w, QuantSpec()), quantize(w, QuantSpec()).dequantize())
    reset = torch.where(torch.arange(256) % 16 == 3, values_of(w, SPEC), w)
    torch.testing.assert_close(values_of(reset, SPEC), values_of(w, SPEC), rtol=1e-6, atol=0)


@pytest.mark.parametrize("done", [5, 9, 17, 19])
def test_between_watches_and_before_the_first_nothing_is_kept(done: int) -> None:
    own = nn.Parameter(torch.randn(2, 128))
    paths: Paths = {}
    before = own.detach().clone()
    assert follow(SETTINGS, paths, [("w", own, QUANTISED)], done, GOOD) is None
    assert follow(OscillationReset(), paths, [("w", own, QUANTISED)], 10, GOOD) is None, (
        "off is the default"
    )
    assert not paths and torch.equal(own, before)


def test_a_failed_step_resets_nothing_and_keeps_what_was_watched() -> None:
    weights = walk(17)
    own = nn.Parameter(weights[10].clone())
    paths: Paths = {}
    for done in range(10, 17):
        own.data.copy_(weights[done])
        follow(SETTINGS, paths, [("w", own, QUANTISED)], done, torch.tensor(done == 16))
    assert torch.equal(own.detach(), weights[16])
    assert set(paths["w"]) == {SEEN, MOVED, JUMPED}


def test_a_weight_without_a_gradient_is_not_watched() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    layers = {name: Namespace(fprop=Namespace(operands=Namespace(second=SPEC))) for name in model}
    linears = [
        Namespace(
            layer=Namespace(name=name, experts=0),
            weight=each.weight,
            values=values_of,
            transposed=False,
        )
        for name, each in model.items()
    ]
    plan = Namespace(at=lambda step: Namespace(layers=layers))
    run = Namespace(model=model, step=10, course=Namespace(plan=plan), planned_layers=linears)
    found = watched(run, ["b.weight", "b.bias"])  # type: ignore[arg-type]
    assert [(name, weight) for name, weight, _ in found] == [("b.weight", model["b"].weight)]
    for each in linears:
        each.transposed = True
    assert not list(watched(run, ["b.weight"])), "a Conv1D's blocks do not lie along its rows"  # type: ignore[arg-type]


def test_experts_are_not_watched_beside_layers_that_are() -> None:
    model = nn.ModuleDict({"mlp": Experts(2, 32, 32), "wq": f4.convert(nn.Linear(32, 32))})
    f4.convert(model)
    plan = f4.plan(model, NVFP4())
    run = Namespace(
        model=model, step=0, course=Namespace(plan=plan), planned_layers=list(model.values())
    )
    found = [
        weight for _, weight, _ in watched(run, [name for name, _ in model.named_parameters()])
    ]  # type: ignore[arg-type]
    assert len(found) == 1 and found[0] is model["wq"].weight


def test_what_has_no_fixed_thresholds_is_not_watched() -> None:
    for recipe in (NVFP4(), TetraJetV2()):
        spec = recipe.table()["fprop"].second
        assert spec is not None and why_not(spec) is None
    again = TetraJetV2().table()["dgrad"].second
    assert again is not None and "draws its thresholds" in str(why_not(again))
    assert "transformed" in str(why_not(QuantSpec(hadamard=Hadamard())))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every": -1}, "oscillation.every=-1"),
        ({"every": 50}, "oscillation.watch=50 must be below oscillation.every=50"),
        ({"watch": 0}, "oscillation.watch=0"),
        ({"ratio": 1.0}, "oscillation.ratio=1.0"),
        ({"start": -2}, "oscillation.start=-2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OscillationReset(**values)  # type: ignore[arg-type]
