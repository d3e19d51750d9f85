"""What words of a command line configure: the whole of it, its model, a recipe or policy by name."""

from collections.abc import Sequence
from functools import cache

from omegaconf import DictConfig

from fp4train.cli.doctor import own_recipes
from fp4train.config import Config, bind, to_config
from fp4train.config.composition import Composed, compose, composed, named
from fp4train.models import Architecture
from fp4train.precision import LayerPolicy, Recipe


def composed_of(*words: str) -> DictConfig:
    """The configuration as Hydra composes it."""
    return compose(list(words))


def points_of(words: Sequence[str]) -> list[Composed]:
    """What each point of a command composes: of a sweep several, else one."""
    return list(composed(list(words)))


def config_of(*words: str) -> Config:
    """The typed configuration."""
    return to_config(composed_of(*words))


def shape_of(model: str, *words: str) -> Architecture:
    """The shape of `model=`, with other words about it."""
    return config_of(f"model={model}", *words).model


@cache
def recipes_by_name() -> dict[str, Recipe]:
    """Every file of recipes/: all of them at once take as long as three of them one by one."""
    return own_recipes()


def recipe_named(name: str) -> Recipe:
    """The recipe of `recipe=`."""
    return recipes_by_name()[name]


def policy_named(name: str) -> LayerPolicy:
    """The policy of `policy=`."""
    return bind(named("policy", name), LayerPolicy, "policy")  # type: ignore[no-any-return]
