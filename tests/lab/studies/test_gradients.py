"""The gradients of parts: what is compared with what, what stays where, and what is not finite."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from subjects import subject_of
from torch import Tensor, nn

from fp4train.errors import UserError
from fp4train.lab.studies import GradientMeter, RecipePart, RecipeParts, Subject
from fp4train.nn import Linear, convert
from fp4train.precision import NVFP4, Custom, FP8Delayed, LossScaling, Operands
from fp4train.quantize import QuantSpec


def opened(
    subject: Subject, repeats: int = 1
) -> tuple[GradientMeter, RecipeParts, dict[str, RecipePart]]:
    parts = RecipeParts(subject, NVFP4(), repeats=repeats)
    named = {part.name: part for part in parts.all()}
    return GradientMeter(subject, parts.reference, list(parts.layers)), parts, named


def test_the_reference_has_no_error_against_itself(trained: Path) -> None:
    gradients, parts, _ = opened(subject_of(trained))
    values = gradients.measure(parts.reference, range(2))
    assert values["error"] == [0.0, 0.0] and values["loss"] == [0.0, 0.0]
    assert values["cosine"] == pytest.approx([1.0, 1.0], abs=1e-6)


def test_it_is_the_gradient_that_a_training_step_would_have(trained: Path) -> None:
    """Of the batch that comes next, against torch's own arithmetic in FP32."""
    subject = subject_of(trained)
    gradients, parts, _ = opened(subject)
    found = gradients.of_reference(range(2))
    gradients.end()
    for index, norm in enumerate(found["norm"]):
        tokens, targets = subject.run.data.training.batch(subject.step + index)
        loss = subject.run.model(tokens, targets)
        loss.backward()
        weights = [subject.run.model.get_parameter(f"{name}.weight") for name in parts.layers]
        wanted = sum(float(weight.grad.square().sum()) for weight in weights)  # type: ignore[union-attr]
        assert norm == pytest.approx(wanted, rel=1e-4)
        assert found["loss"][index] == pytest.approx(loss.item(), rel=1e-5)
        subject.run.model.zero_grad()


def test_error_variance_and_products_agree_with_each_other(trained: Path) -> None:
    gradients, _, named = opened(subject_of(trained), repeats=3)
    norms = gradients.of_reference(range(3))["norm"]
    for name, repeats in (("gemm/fprop", 1), ("everything", 3)):
        values = gradients.measure(named[name], range(3))
        for b, norm in enumerate(norms):
            variance = values["variance"][b] or 0.0
            # E‖e‖² = ‖ē‖² + (R − 1)/R · variance
            assert values["error"][b] == pytest.approx(
                values["gram"][b][b] / norm + (repeats - 1) / repeats * variance
            )
            assert math.fsum(values["layers"][b]) == pytest.approx(values["error"][b])
        assert (values["variance"] == [None] * 3) == (repeats == 1)
        assert values["gram"][0][1] == values["gram"][1][0] != 0


def test_an_error_of_wgrad_stays_in_its_layer(trained: Path) -> None:
    """So one pass with the operand quantised in every layer measures the cells of all."""
    gradients, parts, named = opened(subject_of(trained))
    together, floor = (
        gradients.measure(named[n], range(1))["layers"][0] for n in ("operand/wgrad.x", "nothing")
    )
    place = list(parts.layers).index("blocks.0.mlp.down")
    layers = dict(named["nothing"].stretch.layers)
    layers["blocks.0.mlp.down"] = named["operand/wgrad.x"].stretch.layers["blocks.0.mlp.down"]
    one = replace(
        named["nothing"], name="one", stretch=replace(named["nothing"].stretch, layers=layers)
    )
    alone = gradients.measure(one, range(1))["layers"][0]
    assert alone[place] == together[place] > 2 * floor[place]
    assert [v for i, v in enumerate(alone) if i != place] == [
        v for i, v in enumerate(floor) if i != place
    ]


def test_two_measurements_are_equal_to_the_bit_and_repeats_differ(trained: Path) -> None:
    first, second = (opened(subject_of(trained), repeats=2) for _ in range(2))
    a, b = (
        gradients.measure(named["everything"], range(2)) for gradients, _, named in (first, second)
    )
    assert a == b and a["variance"][0] > 0


def test_microbatches_give_the_gradient_of_the_whole_batch(trained: Path) -> None:
    subject = subject_of(trained)
    gradients, _, named = opened(subject)
    whole = gradients.measure(named["layer/blocks.0.mlp.up"], range(2))["error"]
    gradients.end()
    subject.run.config = replace(
        subject.run.config, train=replace(subject.run.config.train, microbatch=2)
    )
    gradients, _, named = opened(subject)
    assert gradients.measure(named["layer/blocks.0.mlp.up"], range(2))["error"] == pytest.approx(
        whole, rel=0.2
    )


def test_the_subject_is_left_as_it_was(trained: Path) -> None:
    subject = subject_of(trained)
    before = subject.run.config, subject.run.course.plan, subject.run.step, subject.weights
    gradients, _, named = opened(subject, repeats=2)
    gradients.measure(named["everything"], range(2))
    gradients.end()
    assert (subject.run.config, subject.run.course.plan, subject.run.step) == before[:3]
    assert all(parameter.grad is None for parameter in subject.run.model.parameters())
    fresh = subject_of(trained).run.model.state_dict()
    assert all(
        torch.equal(tensor, fresh[name]) for name, tensor in subject.run.model.state_dict().items()
    )


def test_delayed_scales_begin_each_pass_with_what_an_earlier_one_has_seen(trained: Path) -> None:
    subject = subject_of(trained)
    parts = RecipeParts(subject, FP8Delayed(), repeats=1)
    gradients = GradientMeter(subject, parts.reference, list(parts.layers))
    whole = next(part for part in parts.all() if part.name == "everything")
    values = gradients.measure(whole, range(2))
    assert max(values["error"]) < 0.02, "first guesses of the scales would saturate"
    assert gradients.measure(whole, range(2)) == values
    gradients.end()
    assert all(not state for state in subject.run.scaling().values())


@pytest.mark.long
def test_a_recipe_has_its_initial_loss_scale_or_the_largest_one_whose_gradients_are_finite(
    trained: Path,
) -> None:
    """The run had none. With a small one blocks of dy are zero under UE5M3 scales alone."""
    narrow = QuantSpec(scale="ue5m3", global_scale=None)
    errors = []
    for initial, dy in ((2.0**-10, narrow), (2.0**16, narrow), (2.0**130, QuantSpec())):
        recipe = Custom(
            dgrad=Operands(first=dy),
            wgrad=Operands(first=dy),
            scaling=LossScaling(initial=initial),
        )
        subject = subject_of(trained)
        parts = RecipeParts(subject, recipe, repeats=1)
        gradients = GradientMeter(subject, parts.reference, list(parts.layers))
        part = next(part for part in parts.all() if part.name == "everything")
        errors.append(gradients.measure(part, range(2))["error"])
        gradients.end()
        assert subject.run.loss_scale.value == 1.0
    assert min(errors[0]) > 0.5
    assert max(errors[1]) < 0.01 and max(errors[2]) < 0.01


def test_a_gradient_that_is_not_finite_is_named(trained: Path) -> None:
    subject = subject_of(trained)
    gradients, _, named = opened(subject)
    gradients.of_reference(range(1))
    subject.run.model.get_parameter("blocks.0.mlp.down.weight").register_hook(
        lambda grad: grad * math.nan
    )
    with pytest.raises(
        UserError,
        match=r"everything in NVFP4, batch 0: the gradient of blocks\.0\.mlp\.down is not",
    ):
        gradients.measure(named["everything"], range(1))


def test_a_frozen_layer_is_named(trained: Path) -> None:
    subject = subject_of(trained)
    gradients, _, named = opened(subject)
    subject.run.model.get_parameter("blocks.0.attention.wq.weight").requires_grad_(False)
    with pytest.raises(
        UserError,
        match=r"blocks\.0\.attention\.wq gets no gradient; is its weight frozen\? .* fp4train rank ",
    ):
        gradients.measure(named["everything"], range(1))


class Flat(nn.Module):
    """A model without blocks."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocabulary, 32), nn.Linear(32, 32)
        self.out = nn.Linear(32, vocabulary)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits = self.out(torch.tanh(self.inner(self.embed(tokens_BT))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def test_a_model_without_blocks_has_a_block_for_each_layer(trained: Path) -> None:
    subject = subject_of(trained)
    subject.run.model = convert(Flat(subject.run.model.vocab_size))  # type: ignore[arg-type]
    subject.run.planned_layers = [
        module for module in subject.run.model.modules() if isinstance(module, Linear)
    ]
    gradients, parts, named = opened(subject)
    assert list(parts.layers) == ["inner", "out"]
    values = gradients.measure(named["layer/inner"], range(1))
    assert values["error"][0] > 0
