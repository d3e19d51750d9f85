"""The words that verbs on a trained model share: recipes, policies, plugins, and paths of the run's configuration."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

from hydra.core.override_parser.types import Override

from fp4train.checkpoint.source import WeightSource
from fp4train.config import overrides, plugins
from fp4train.config.binding import bind
from fp4train.config.overrides import CommandLine, Option
from fp4train.config.schema import Config, plain
from fp4train.errors import UserError, user_errors
from fp4train.exchange.trained import NamedRecipe, TrainedModel, load_trained
from fp4train.lab.studies.candidates import Axis, candidates, sweep_axes
from fp4train.precision import LayerPolicy, Recipe
from fp4train.text import near_miss, whole_number

Task = Callable[[TrainedModel, Sequence[NamedRecipe]], int]
"""Work of a verb on a model and the recipes that are named, of which there may be none; gives the
exit code.
"""

STEP = Option(whole_number, "step={!r} must be the step of a checkpoint")
CHOSEN = ("recipe", "policy")
_PATHS = {field.name for field in fields(Config)} - {"plugins", *CHOSEN}
"""Sections of a run's configuration, whose paths may be given."""


def source_named(word: str, step: int | None) -> WeightSource:
    """The weights that a word of a command names, and an option step=.

    Raises:
        UserError: each names a step.
    """
    with user_errors(ValueError):
        return WeightSource.parse(word, step)


def with_model(
    usage: str, line: CommandLine, options: Sequence[str], step: int | None, task: Task
) -> int:
    """Load the model of the one run that a command names, and do `task`; returns its exit code.

    Args:
        usage: the first line of the verb's help, "fp4train VERB …".
        line: the command line, of which the verb has taken its own options.
        options: names of these options, for suggestions.
        step: step of the checkpoint; None: the newest.

    Raises:
        UserError: another number of runs, an unknown key or option, or what `load_trained` refuses.
    """
    line.check_flags(usage)
    if len(line.runs) != 1:
        raise UserError(f"{usage.split()[1]} takes the directory of one run: {usage}")
    folders = overrides.own_folders(line.flags)
    words = overrides.parse(line.overrides)
    chosen = []
    path_words = []
    for word in words:
        if word.key_or_group.partition(".")[0] in CHOSEN:
            chosen.append(str(word.input_line))
        else:
            path_words.append(word)
    paths = named_paths(path_words, (*CHOSEN, *options))
    with plugins.using(overrides.plugins(line.overrides), folders):
        axes = sweep_axes(overrides.with_files(chosen), folders)
        trained = load_trained(source_named(line.runs[0], step), paths)
        return task(trained, _named(trained, axes))


def named_paths(words: Iterable[Override], options: Sequence[str]) -> dict[str, str | None]:
    """Paths of the run's configuration that a command names, by their full keys.

    Args:
        words: overrides of the command line, without the verb's own options.
        options: names of these options, for suggestions.

    Raises:
        UserError: a key is no path, and is not `plugins`.
    """
    paths: dict[str, str | None] = {}
    for word in words:
        key = word.key_or_group
        if key.partition(".")[0] in _PATHS and isinstance(path := word.value(), str | None):
            paths[key] = path
        elif key != "plugins":
            every = (*options, "plugins")
            raise UserError(
                f"unknown key {key!r}{near_miss(key, every)} (known: {', '.join(every)})"
            )
    return paths


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
