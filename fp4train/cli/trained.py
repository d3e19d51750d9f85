"""The words that verbs on a trained model share: recipes, policies, plugins, and paths of the run's configuration."""

from collections.abc import Callable, Sequence

from fp4train.checkpoint.source import WeightSource
from fp4train.config.binding import bind
from fp4train.config.command_line import CommandLine
from fp4train.config.schema import plain
from fp4train.errors import user_errors
from fp4train.exchange import NamedRecipe, TrainedModel, load_trained
from fp4train.lab.studies import Axis, candidates, sweep_axes
from fp4train.precision import LayerPolicy, Recipe
from fp4train.run.states import WEIGHT_KINDS

Task = Callable[[TrainedModel, Sequence[NamedRecipe]], int]
"""Work of a verb on a model and the recipes that are named, of which there may be none; gives the
exit code.
"""

KEYS = ("recipe", "policy", "plugins")
"""Sections of a run that these verbs take."""


def with_weight_kinds(help_screen: str | None) -> str:
    """The help of a verb, with a line about each kind of weights that a run may keep beside the
    trained ones, in the place of the line {kinds}.
    """
    lines = [
        f"  {f'RUN:{kind}':<16} the run's {state.title}, kept with {state.option}"
        for kind, state in WEIGHT_KINDS.items()
    ]
    return (help_screen or "").replace("{kinds}", "\n".join(lines))


def source_named(word: object, step: int | None) -> WeightSource:
    """The weights that a word of a command names, and an option step=.

    Raises:
        UserError: each names a step.
    """
    with user_errors(ValueError):
        return WeightSource.parse(str(word), step)


def with_model(line: CommandLine, step: int | None, task: Task) -> int:
    """Load the model of the one run that a command names, and do `task`; returns its exit code.

    Args:
        step: step of the checkpoint; None: the newest.

    Raises:
        UserError: another number of runs, or what `load_trained` refuses.
    """
    source = source_named(line.run, step)
    with line.using_plugins():
        axes = sweep_axes(line.chosen, line.folders)
        trained = load_trained(source, line.paths)
        return task(trained, _named(trained, axes))


def _named(trained: TrainedModel, axes: Sequence[Axis]) -> list[NamedRecipe]:
    """The recipes that a command names with the policies; a policy alone is that of the model's own
    recipe.
    """
    if not axes:
        return []
    alone = not any(key.partition(".")[0] == "recipe" for key, _ in axes)
    return [
        NamedRecipe(
            name=trained.own.name if alone else candidate.name,
            recipe=trained.own.recipe if alone else bind(candidate.recipe, Recipe, "recipe"),
            policy=bind(candidate.policy, LayerPolicy, "policy"),
        )
        for candidate in candidates(axes, plain(trained.cfg))
        if candidate.asked
    ]
