"""The gradient of a part of a recipe against that of FP32 over the same batches.

With g₀ the FP32 gradient of a batch, g that of the part and e = g − g₀, over the weights of the
layers that the recipe quantises:

    error      ‖e‖²/‖g₀‖², the normalised squared error of a batch; the mean over stochastic
               repeats
    variance   the variance of g over the repeats, Σ‖gᵣ − ḡ‖²/(R − 1), as a share of ‖g₀‖²
    gram       ⟨ē_b, ē_b'⟩ of the batches of a group, ē the mean over repeats: the products of
               different batches are unbiased for the squared systematic error, because what varies
               with the batch cancels in them
    cosine     the cosine of g and g₀
    loss       the change of the loss, nats per token
    layers     the part of each layer in the error (not of parts that are a single layer)

A group of batches is measured at a time, because `gram` needs the errors of two batches at once;
vectors are kept for one group only.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp4train.errors import UserError
from fp4train.lab.studies.parts import LAYER, RecipePart
from fp4train.lab.studies.record import Reading
from fp4train.lab.studies.subject import Subject
from fp4train.nn.planned import PlannedLayer
from fp4train.precision.loss_scaling import SMALLEST_LOSS_SCALE
from fp4train.precision.plan import Plan
from fp4train.run.finite import first_non_finite
from fp4train.run.state.base import LossScale
from fp4train.run.state.numbers import coming_loss_scale
from fp4train.run.step import eagerly, microbatch_share, microbatches, step_rows
from fp4train.run.supervise.guard import first_non_finite_output

KEPT_BYTES = 1 << 30
"""References are kept for the next part up to this size; those of one group always are."""

Vector = dict[str, Tensor]
"""A gradient by layer."""


class GradientOverflowError(UserError):
    """The gradients of a pass are not finite, and its loss is."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass over a batch: loss, gradient of the studied layers."""

    loss: float
    gradient: Vector


class GradientMeter:
    """Measures parts on a subject.

    Args:
        subject: `end` leaves it as it was.
        reference: the part that the others are compared with.
        layers: names of the layers whose weights' gradients are compared.
    """

    def __init__(self, subject: Subject, reference: RecipePart, layers: Sequence[str]) -> None:
        self.subject, self.reference, self.layers = subject, reference, list(layers)
        self._linears: dict[str, PlannedLayer] = {
            m.layer.name: m for m in subject.run.planned_layers
        }
        self._before = (
            subject.run.config,
            subject.run.course.plan,
            subject.run.step,
            subject.run.loss_scale,
        )
        self._scaling = subject.run.scaling()
        self._loss_scale = 1.0
        """That of the part that is measured, if its recipe has one."""
        self._known: OrderedDict[int, Pass] = OrderedDict()

    def measure(self, part: RecipePart, batches: range) -> Reading:
        """The values of `part` over a group of batches, batch 0 being the one that the run would
        train on next.

        Raises:
            UserError: a loss or gradient is not finite.
        """
        self.subject.run.loss_scale = self._before[-1]
        self._loss_scale = coming_loss_scale(self.subject.run, part.stretch.recipe)
        scaling = self._begin(part, batches.start)
        values: dict[str, list[Any]] = {
            key: [] for key in ("error", "variance", "cosine", "loss", "layers")
        }
        means: list[Vector] = []
        for batch in batches:
            true = self._true(batch)
            self._begin(part, batch, scaling)
            comparisons = [
                self._compare(part, batch, repeat, true, scaling) for repeat in range(part.repeats)
            ]
            errors = [error for _, error in comparisons]
            mean = {}
            for name in self.layers:
                mean[name] = sum((error[name] for error in errors[1:]), errors[0][name]) / len(
                    errors
                )
            norm = _squared(true.gradient)
            squared_error = math.fsum(_squared(error) for error in errors) / len(errors)
            values["error"].append(squared_error / norm)
            spread = (squared_error - _squared(mean)) * len(errors) / max(1, len(errors) - 1)
            values["variance"].append(spread / norm if len(errors) > 1 else None)
            for key in ("cosine", "loss"):
                mean_value = math.fsum(numbers[key] for numbers, _ in comparisons) / len(errors)
                values[key].append(mean_value)
            named = [] if part.kind == LAYER else self.layers
            values["layers"].append(
                [
                    math.fsum(float(e[name].square().sum()) for e in errors) / len(errors) / norm
                    for name in named
                ]
            )
            means.append(mean)
        return {**values, "gram": _gram(means)}

    def of_reference(self, batches: range) -> Reading:
        """The reference's own values: squared norms and products of its gradients, losses, and each
        layer's share.
        """
        passes = [self._true(batch) for batch in batches]
        norms = [_squared(reference.gradient) for reference in passes]
        layers = [
            [float(p.gradient[n].square().sum()) / norm for n in self.layers]
            for p, norm in zip(passes, norms, strict=True)
        ]
        return {
            "norm": norms,
            "loss": [reference.loss for reference in passes],
            "gram": _gram([reference.gradient for reference in passes]),
            "layers": layers,
        }

    def end(self) -> None:
        """Leave run and model as they were."""
        run = self.subject.run
        run.config, run.course.plan, run.step, run.loss_scale = self._before
        run.load_scaling(self._scaling)
        self.subject.run.model.zero_grad(set_to_none=True)

    def _compare(
        self,
        part: RecipePart,
        batch: int,
        repeat: int,
        true: Pass,
        scaling: dict[str, dict[str, Tensor]],
    ) -> tuple[dict[str, float], Vector]:
        run = self.subject.run
        run.config = replace(run.config, run=replace(run.config.run, seed=repeat))
        run.load_scaling(scaling)
        measured = self._pass(part, batch)
        error = {name: measured.gradient[name] - true.gradient[name] for name in self.layers}
        length = math.sqrt(_squared(measured.gradient) * _squared(true.gradient))
        numbers = {
            "cosine": _product(measured.gradient, true.gradient) / length if length else 0.0,
            "loss": measured.loss - true.loss,
        }
        return numbers, error

    def _true(self, batch: int) -> Pass:
        """The reference on a batch."""
        if batch in self._known:
            self._known.move_to_end(batch)
            return self._known[batch]
        self._begin(self.reference, batch)
        reference = self._pass(self.reference, batch)
        if not _squared(reference.gradient) > 0:
            raise UserError(
                f"the gradient of batch {batch} is 0 in high precision: there is nothing to "
                "compare with"
            )
        self._known[batch] = reference
        size = sum(tensor.nbytes for tensor in reference.gradient.values())
        while len(self._known) > max(4, KEPT_BYTES // max(1, size)):
            self._known.popitem(last=False)
        return reference

    def _begin(
        self, part: RecipePart, batch: int, scaling: dict[str, dict[str, Tensor]] | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Let the model run `part` on `batch`; the scales to begin each pass with.

        Delayed scales come from earlier steps: a part whose layers have seen none gets them from a
            pass of its own.
        """
        run = self.subject.run
        run.step = self.subject.step + batch
        if part.stretch.recipe.loss_scaling is None:
            run.loss_scale = LossScale()
        else:
            run.loss_scale = LossScale(self._loss_scale)
        run.course.plan = Plan(
            stretches=(replace(part.stretch, stop=run.step + 1),),
            policy=run.config.policy,
            tokens=run.course.plan.tokens,
            device=run.course.plan.device,
        )
        run.apply(run.course.plan.stretches[0])
        if scaling is not None:
            return scaling
        run.load_scaling(self._scaling)
        delayed = {
            name
            for name, plan in part.stretch.layers.items()
            if any(spec.earlier_amax for spec in plan.table.specs())
        }
        if any(not self._scaling.get(name) for name in delayed):
            self._pass(part, batch)
        return run.scaling()

    def _pass(self, part: RecipePart, batch: int) -> Pass:
        """A pass with the largest loss scale, from the present one down, whose gradients are
        finite: training skips steps until it has that.
        """
        run = self.subject.run
        loss_scaling = part.stretch.recipe.loss_scaling
        scaling = run.scaling()
        known_to_end = False
        while True:
            try:
                return self._pass_at_scale(part, batch)
            except GradientOverflowError:
                if loss_scaling is None or run.loss_scale.value <= SMALLEST_LOSS_SCALE:
                    raise
            too_large = run.loss_scale.value
            if not known_to_end:  # a number that is not finite at any scale is told at once
                run.load_scaling(scaling)
                run.loss_scale = LossScale(SMALLEST_LOSS_SCALE)
                self._pass_at_scale(part, batch)
                known_to_end = True
            self._loss_scale, _ = loss_scaling.update(too_large, 0, finite=False)
            run.loss_scale = LossScale(self._loss_scale)
            run.load_scaling(scaling)

    def _pass_at_scale(self, part: RecipePart, batch: int) -> Pass:
        """A pass with the loss scale that the run has.

        Raises:
            GradientOverflowError: the gradients are not finite, and the loss is.
        """
        run = self.subject.run
        model = self.subject.run.model
        recipe = run.course.plan.stretches[0].recipe
        share = microbatch_share(run)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(batch)  # dropout, if the model has some, drops the same in every part
        total = 0.0
        with eagerly(run), run.region():
            for rows in microbatches(run, recipe, step_rows(run)):
                loss = rows.loss(model)
                (loss * (run.loss_scale.value * share)).backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach()) * share
        where = f"{part.name} in {recipe.name}, batch {batch}"
        if not math.isfinite(total):
            bad = first_non_finite_output(
                model, (rows.loss(model) for rows in microbatches(run, recipe, step_rows(run)))
            )
            raise UserError(f"{where}: the loss is {total}; first non-finite: {bad}")
        gradient = {}
        for name in self.layers:
            grad = self._linears[name].weight.grad
            if grad is None:
                raise UserError(
                    f"{where}: {name} gets no gradient; is its weight frozen? The study compares "
                    "the gradients of all layers that the recipe quantises. fp4train rank compares "
                    "recipes by the losses of forks, of frozen weights, too"
                )
            gradient[name] = grad.detach().float() / run.loss_scale.value
        if not math.isfinite(_squared(gradient)):
            # Backward reaches the last layers first.
            bad_layer = first_non_finite({name: gradient[name] for name in reversed(self.layers)})
            scale = run.loss_scale.value
            at_scale = f" at the loss scale {scale:g}" if scale != 1 else ""
            raise GradientOverflowError(
                f"{where}: the gradient of {bad_layer or 'the layers together'} is not finite"
                f"{at_scale}"
            )
        model.zero_grad(set_to_none=True)
        return Pass(total, gradient)


def _product(a: Vector, b: Vector) -> float:
    return math.fsum(float(torch.dot(a[name].flatten(), b[name].flatten())) for name in a)


def _squared(a: Vector) -> float:
    return _product(a, a)


def _gram(vectors: Sequence[Vector]) -> list[list[float]]:
    """The inner products of all pairs."""
    products = [[0.0] * len(vectors) for _ in vectors]
    for i, a in enumerate(vectors):
        for j, b in enumerate(vectors[: i + 1]):
            products[i][j] = products[j][i] = _product(a, b)
    return products
