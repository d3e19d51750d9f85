"""Evaluations run applied plans: that of the stretch, and the same in high precision, which a run
resolves once.
"""

from typing import Any

import pytest
from command_line import Before, Cli
from resolving import refuse_resolving

from fp4train.precision import Context
from fp4train.quantize import Position, RunStep
from fp4train.run import run as runs


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
    make_plan = runs.make_plan

    def noted(layers: Any, timeline: Any, *rest: Any, **more: Any) -> Any:
        planned.append(timeline.recipe.name)
        return make_plan(layers, timeline, *rest, **more)

    monkeypatch.setattr(runs, "make_plan", noted)
    words = (
        "train.steps=5",
        "eval.every=1",
        "eval.errors_every=2",
        "phases.cooldown.start=3",
    )
    assert cli("run.name=a", *words, *options).code == 0
    assert len(planned) == 2, (
        "one plan in high precision for each stretch, whatever the number of evaluations"
    )


def test_after_an_evaluation_the_layers_have_the_plan_of_their_stretch(
    cli: Cli, before: Before
) -> None:
    def look(run: Any) -> None:
        high = run.in_high_precision(run.plan.at(run.step)).recipe
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
