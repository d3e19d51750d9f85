"""Few recipes that together have every part that a file of recipes/ has: tests of what all recipes
share, such as a model's layers, take them; tests/run/test_every_recipe.py trains them all.
"""

from collections.abc import Hashable, Iterator
from dataclasses import fields
from functools import cache

from fp4train.cli.doctor import own_recipes
from fp4train.precision import Recipe


def parts(recipe: Recipe) -> Iterator[Hashable]:
    """The value of each field of its operands, whichever GEMM they are of; the GEMMs in high
    precision; and its fields that all recipes have.
    """
    for gemm, operands in recipe.table().items():
        for spec in operands.both:
            if spec is None:
                yield gemm, "high precision"
            else:
                yield from ((field.name, getattr(spec, field.name)) for field in fields(spec))
    yield from ((field.name, getattr(recipe, field.name)) for field in fields(Recipe))


@cache
def covering_recipes() -> tuple[str, ...]:
    """Names, in alphabetical order. A recipe whose parts the others have between them is left out."""
    parts_of = {name: set(parts(recipe)) for name, recipe in own_recipes().items()}
    missing = set.union(*parts_of.values())
    chosen = []
    while missing:
        name = max(sorted(parts_of), key=lambda name: len(parts_of[name] & missing))
        chosen.append(name)
        missing -= parts_of[name]
    return tuple(sorted(chosen))
