"""The ledger of published recipes: which file of `recipes/` stands for which paper or program.

Its data are `configs/ledger.yaml`; `fp4train recipes` and docs/recipes.md show them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from fp4train.config import CONFIGS
from fp4train.config.binding import bind

LEDGER = CONFIGS / "ledger.yaml"
ARXIV = "https://arxiv.org/abs/"


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A figure that a paper gives.

    Args:
        what: the quantity that was measured.
        published: the value of the paper, with its unit.
        here: the value of scripts/paper/published_figures.py; None: nothing here computes it.
    """

    what: str
    published: str
    here: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedRecipe:
    """A recipe of a paper or program, and the file of `recipes/` that mirrors it.

    Args:
        recipe: name of the file.
        title: title of the paper, or what of the program is mirrored.
        arxiv: number of the paper; `url`: address of a source without one.
        mirrored, differs: parts of the paper that the file has; parts that it has not, with
            the reason.
        kept: layers that the source keeps in other precision.
        words: words of the command line beside `recipe=`: the policy, the phases, and what else
            belongs to it. Without phases the default would change the forward pass of any recipe.
    """

    recipe: str
    title: str
    year: int
    mirrored: str
    differs: str
    kept: str
    arxiv: str | None = None
    url: str | None = None
    words: Sequence[str] = ()
    figures: Sequence[PublishedFigure] = ()

    @property
    def link(self) -> str:
        return self.url or f"{ARXIV}{self.arxiv}"

    @property
    def source(self) -> str:
        """Number of the paper, or owner and repository of a program."""
        if self.arxiv is not None:
            return f"arXiv {self.arxiv}"
        return "/".join(self.link.split("/")[3:5])

    @property
    def command(self) -> str:
        return f"fp4train {self.settings}"

    @property
    def settings(self) -> str:
        """The words of the command that trains it."""
        return " ".join([f"recipe={self.recipe}", *self.words])


def ledger(path: Path = LEDGER) -> list[PublishedRecipe]:
    """The entries of the ledger, in its order.

    Raises:
        UserError: an entry has an unknown key, or a value of another type.
    """
    return list(
        bind(
            OmegaConf.to_container(OmegaConf.load(path).published), list[PublishedRecipe], path.name
        )
    )


def code_read(path: Path = LEDGER) -> dict[str, str]:
    """What was read of the authors' code, by name of the recipe: repository, commit and files, or
    why none was.
    """
    return dict(bind(OmegaConf.to_container(OmegaConf.load(path).code), dict[str, str], path.name))
