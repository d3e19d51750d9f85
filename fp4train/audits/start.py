"""Checks of a plan before its first step: each distinct quantiser, and a call of each distinct
layer, on small random tensors.

Layers are tried with the features that they have, up to `FEATURES`; wider ones with 256–511, whose
remainder by 256 is the same, so that they are padded alike. Of a group of experts one is tried, as
a layer of its own.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from fp4train.audits.fault import Fault
from fp4train.audits.loop import audit
from fp4train.audits.observe import why_not_observed
from fp4train.nn import Linear
from fp4train.nn.executors import executor_class
from fp4train.precision.context import autocast
from fp4train.precision.layer_plan import LayerPlan
from fp4train.precision.plan import Plan
from fp4train.quantize import QuantSpec, RandomKey, quantizer

_log = logging.getLogger(__name__)

FEATURES: Final = 512
TOKENS: Final = 64


def check_plan(
    plan: Plan, guarding: Callable[[str], AbstractContextManager[object]] = nullcontext
) -> Iterator[Fault]:
    """The faults of the quantisers and layers of a plan on its device.

    Args:
        guarding: gives the context of the trial of a quantiser or layer of this name; where it
            swallows what the trial raises, the others follow.
    """
    layers = [layer_plan for stretch in plan.stretches for layer_plan in stretch.layers.values()]
    device = plan.device.type
    for spec in dict.fromkeys(spec for layer_plan in layers for spec in layer_plan.specs):
        faults: list[Fault] = []
        with guarding(str(spec)):
            faults = quantiser_faults([spec], device)
        yield from faults
    distinct: dict[object, LayerTrial] = {}
    for layer_plan in layers:
        layer = layer_plan.layer
        if layer.unconverted is None:
            layer_plan = _of_one_weight(layer_plan)
            shape = (_narrowed(layer.in_features), _narrowed(layer.out_features))
            trial = LayerTrial(layer_plan, device, shape)
            distinct.setdefault((layer_plan.computation, layer_plan.recipe, shape), trial)
    for trial in distinct.values():
        faults = []
        with guarding(f"a layer like {trial.plan.layer.name}"):
            faults = trial.call_faults()
        yield from faults


def _of_one_weight(plan: LayerPlan) -> LayerPlan:
    """The plan of a layer on one rank; of a group of experts that of one of them."""
    layer = replace(plan.layer, experts=0, per_token=1, cut=None, parts=1, segments=())
    fprop, dgrad, wgrad = (replace(gemm, grouped=False) for gemm in plan.gemms)
    return replace(plan, layer=layer, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


def _narrowed(features: int) -> int:
    if features <= FEATURES:
        return features
    return FEATURES - 256 + features % 256


def quantiser_faults(specs: Iterable[QuantSpec], device: str) -> list[Fault]:
    """The specs whose kernel on a device quantises otherwise than the readable reference."""
    what = "its kernel quantises otherwise than the reference"
    return [
        Fault(layer=str(spec), what=what)
        for spec in dict.fromkeys(specs)
        if not equal_codes(spec, device)
    ]


@dataclass(frozen=True)
class LayerTrial:
    """A layer of a plan on small random tensors: before the first step of a run, of `fp4train check`
    and of the doctor.

    Args:
        device: type of the device.
        shape: its in and out features.
    """

    plan: LayerPlan
    device: str
    shape: tuple[int, int]

    def quantiser_faults(self) -> list[Fault]:
        """The faults of the quantisers of its operands."""
        return quantiser_faults(self.plan.specs, self.device)

    def why_not_observed(self) -> str | None:
        """Why its calls cannot be observed; None: they can be."""
        return why_not_observed(executor_class(self.plan), self.plan)

    def call_faults(self) -> list[Fault]:
        """The faults of its three GEMMs in one call; none where it cannot be observed."""
        plan = self.plan
        if self.why_not_observed() is not None:
            return []
        in_features, out_features = self.shape
        with torch.random.fork_rng(devices=[]):  # its first weights leave the run's numbers alone
            empty = nn.Linear(in_features, out_features, bias=False)
        with torch.no_grad():
            empty.weight.copy_(drawn(out_features, in_features, seed=2) / in_features**0.5)
        layer = replace(
            plan.layer, in_features=in_features, out_features=out_features, fused=(), names=()
        )
        backends = {gemm.backend for gemm in plan.gemms if gemm.operands.quantised}
        backend = backends.pop() if len(backends) == 1 else "auto"
        linear = Linear.from_linear(empty.to(self.device), layer, backend)
        linear.joined = True  # alone, whatever ranks there are
        x = drawn(TOKENS, in_features, seed=3).to(self.device, torch.bfloat16).requires_grad_()
        dy = drawn(TOKENS, out_features, seed=4).to(self.device, torch.bfloat16)
        recipe = plan.recipe if plan.fused == () else replace(plan.recipe, fused_scales=False)
        with audit(linear) as report:
            with autocast(recipe, step=0):
                y = linear(x)
            y.backward(dy)
        for reason in report.uncovered.values():
            _log.warning("a layer like %s could not be tried: %s", plan.layer.name, reason)
        return report.faults


def equal_codes(spec: QuantSpec, device_type: str) -> bool:
    """Whether the device's quantiser gives the codes, the block scales and the global scale of the
    readable reference, for one tensor.
    """
    x = drawn(64, 256, seed=1).to(torch.bfloat16)
    key = amax = None
    if spec.random:
        key = RandomKey(seed=1, step=2, layer=3, operand=0)
    if spec.delayed is not None:
        amax = torch.tensor(3.0)
    reference = quantizer(spec, "cpu", "reference").codes(x, key, amax)
    amax_there = None if amax is None else amax.to(device_type)
    quantised = quantizer(spec, device_type).codes(x.to(device_type), key, amax_there)
    if not torch.equal(quantised.codes.cpu(), reference.codes):
        return False
    if not torch.equal(quantised.scales.cpu(), reference.scales):
        return False
    scale = reference.global_decode()
    scale_there = quantised.global_decode()
    if scale is None or scale_there is None:
        return scale is scale_there
    return torch.equal(scale_there.cpu().reshape(-1), scale.reshape(-1))


def drawn(rows: int, columns: int, *, seed: int) -> Tensor:
    """Gaussian numbers, float32 [rows, columns], of a generator of their own."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
