"""docs/recipes.md shows the ledger as it is, and its commands run."""

from pathlib import Path

import pytest
from configured import recipe_named
from recipes_table import markdown
from shown import DOCS, SMALL, commands, table

from fp4train.cli import main
from fp4train.lab.ledger import ledger
from fp4train.quantize.triton_steps import why_not_steps

TEXT = (DOCS / "recipes.md").read_text(encoding="utf-8")


def test_the_page_shows_the_ledger() -> None:
    assert "\n".join(markdown(ledger())) in TEXT


def test_the_page_names_the_recipes_that_the_reference_quantises_on_gpus() -> None:
    without = set()
    for name in {entry.recipe for entry in ledger()}:
        recipe = recipe_named(name)
        if any(why_not_steps(spec) is not None for spec in recipe.table().specs()):
            without.add(name)
    assert without == {name.strip("`") for name, _ in table("recipes.md", "without a kernel")}


def ended(*words: str) -> object:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as raised:
        main(list(words))
    return raised.value.code


@pytest.mark.long
def test_commands_of_the_page_run(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes, recipe, paper, train, rank = commands("recipes.md")
    for words in (recipes, recipe, paper):
        assert ended(*words[1:]) == 0
    assert "Format-Aware Fusion" in capsys.readouterr().out
    assert ended(*train[1:], *SMALL, "run.name=a", "train.steps=2") == 0
    assert ended(*rank[1:], "steps=1", "forks=1", "batches=1") == 0
    assert Path("runs/a/studies").is_dir()
