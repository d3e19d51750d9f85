"""fp4train recipes [NAME]

The published recipes that files of recipes/ mirror, as a table: their papers
and programs (docs/recipes.md).

  NAME             one recipe in full, or those of a paper by its number
                   (2610.00053): what is mirrored and what is not
"""

from collections.abc import Sequence

from fp4train.cli.output import print_screen
from fp4train.config.binding import bind
from fp4train.config.command_line import CommandLine, read_line
from fp4train.config.composition import named
from fp4train.config.folders import own_options
from fp4train.errors import UserError
from fp4train.lab.ledger import PublishedRecipe, code_read, ledger
from fp4train.precision import Recipe
from fp4train.text import near_miss


def main(arguments: list[str]) -> int:
    """Print the table, or recipes in full; returns the exit code."""
    entries = ledger()
    line = read_line(arguments, CommandLine, __doc__)
    if len(line.words) > 1:
        raise UserError(f"recipes takes one NAME: {line.usage}")
    if line.words:
        _print_in_full(line.words[0], entries)
    else:
        published = {entry.recipe for entry in entries}
        further = [name for name in own_options()["recipe"] if name not in published]
        print_screen("recipes.txt", entries=entries, further=further)
    return 0


def _print_in_full(name: str, entries: Sequence[PublishedRecipe]) -> None:
    """Print the entries of one recipe or paper, and the operands of their recipes.

    Raises:
        UserError: there is no such recipe or paper; the message suggests one.
    """
    chosen = [entry for entry in entries if name in (entry.recipe, entry.arxiv)]
    options = own_options()["recipe"]
    if not chosen and name not in options:
        papers = [entry.arxiv for entry in entries if entry.arxiv]
        raise UserError(
            f"recipes {name}: there is no such recipe or paper"
            f"{near_miss(name, [*options, *papers]) or '; fp4train recipes lists them'}"
        )
    names = dict.fromkeys(entry.recipe for entry in chosen) or [name]
    recipes: list[Recipe] = [bind(named("recipe", option), Recipe, "recipe") for option in names]
    print_screen("recipe.txt", entries=chosen, recipes=recipes, code=code_read())
