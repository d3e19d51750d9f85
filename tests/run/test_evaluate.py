"""Evaluations run applied plans: that of the stretch, and the same in high precision, which a run
resolves once. They read each held-out sequence once.
"""

import json
from typing import Any

import pytest
from command_line import STEADY, Before, Cli, lines
from resolving import refuse_resolving

from fp4train.precision import Context
from fp4train.quantize import Position, RunStep
from fp4train.run import timeline as courses


@pytest.mark.parametrize(
    "options",
    [(), ("recipe=fp8_delayed", "model.recompute=true", "train.microbatch=2", "policy=all")],
    ids=["default", "delayed scaling, recomputed"],
)
def test_steps_evaluations_and_measured_steps_resolve_nothing_in_a_call(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    refuse_resolving(monkeypatch)
    planned: list[str] = []
    make_plan = courses.make_plan

    def noted(layers: Any, timeline: Any, *rest: Any, **more: Any) -> Any:
        planned.append(timeline.recipe.name)
        return make_plan(layers, timeline, *rest, **more)

    monkeypatch.setattr(courses, "make_plan", noted)
    words = (
        "train.steps=3",
        "eval.every=1",
        "eval.errors_every=2",
        "phases.cooldown.start=2",
    )
    assert cli("run.name=a", *words, *options).code == 0
    assert len(planned) == 2, (
        "one plan in high precision for each stretch, whatever the number of evaluations"
    )


def test_after_an_evaluation_the_layers_have_the_plan_of_their_stretch(
    cli: Cli, before: Before
) -> None:
    def look(run: Any) -> None:
        high = run.course.in_high_precision(run.course.plan.at(run.step)).recipe
        assert not high.quantised
        context = Context(
            recipe=high,
            policy=run.config.policy,
            position=Position(RunStep(0, run.step)),
            counts="tokens",
            applied=True,
        )
        with pytest.raises(RuntimeError, match="apply the plan of the coming stretch"):
            run.planned_layers[0].executor_in(context, run.device)

    before(1, look)
    assert cli("run.name=a", "train.steps=2", "eval.every=1").code == 0


SEVEN_SEQUENCES = ("recipe=fp32", "policy=all", "data.val=225", *STEADY)


def test_the_validation_loss_is_of_each_sequence_once_whatever_the_batch(cli: Cli) -> None:
    """Of seven sequences of 32 tokens all, or the first six; `fp4train eval` reads all."""
    begun = cli.trained("run.name=begun", *SEVEN_SEQUENCES, "optim.lr=0.01")

    def loss(batch: int, batches: int, *words: str) -> float:
        name = f"{batch}-{batches}"
        given = (*SEVEN_SEQUENCES, f"init={begun}", "train.steps=1", "optim.lr=1e-12", *words)
        ended = cli(
            f"run.name={name}", *given, f"train.batch_size={batch}", f"eval.batches={batches}"
        )
        assert ended.code == 0
        (value,) = [line["val/loss"] for line in lines(f"runs/{name}") if "val/loss" in line]
        return float(value)

    whole = loss(1, 7)
    for batch in (2, 3, 16):
        assert loss(batch, 9) == pytest.approx(whole, abs=1e-6), batch
    assert loss(4, 8, "train.microbatch=2") == pytest.approx(whole, abs=1e-6)
    bounded = loss(1, 6)
    assert abs(bounded - whole) > 1e-4
    for batch, batches in ((3, 2), (6, 1)):
        assert loss(batch, batches) == pytest.approx(bounded, abs=1e-6), batch
    for words, expected in (((), whole), (("batches=2",), bounded)):
        shown = json.loads(cli.raw("eval", "runs/3-2", "record=false", "--json", *words).out)
        values = shown["scores"][0]["values"]
        assert values["loss"] == pytest.approx(expected, abs=1e-6)
        assert values["tokens"] == (7 if expected == whole else 6) * 32
