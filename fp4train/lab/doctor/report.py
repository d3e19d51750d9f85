"""The findings, as one screen for people or as JSON for issue reports."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp4train import __version__
from fp4train.lab.doctor.machine import Fact, device, parts
from fp4train.lab.doctor.recipes import RecipeCheck, check_all
from fp4train.precision.recipe import Recipe
from fp4train.text import screen

WIDTH = 120
HEADER = ("recipe", "runs here", "quantised by", "codes", "native on")


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Everything; `default` is the recipe of the default run."""

    device: str
    default: str
    machine: tuple[Fact, ...]
    recipes: tuple[RecipeCheck, ...]

    @property
    def problems(self) -> list[str]:
        """Problems that keep the default run from working."""
        problems = [f"{part.name}: {part.problem}" for part in self.machine if part.problem]
        return problems + [
            f"recipe={recipe.name}: {recipe.problem}"
            for recipe in self.recipes
            if recipe.problem and recipe.name == self.default
        ]

    @property
    def notes(self) -> list[str]:
        """Parts that something else than the default run lacks."""
        notes = [f"{part.name}: {part.note}" for part in self.machine if part.note]
        return notes + [
            f"recipe={recipe.name}: {recipe.problem}"
            for recipe in self.recipes
            if recipe.problem and recipe.name != self.default
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "fp4train": __version__,
            **asdict(self),
            "problems": self.problems,
            "notes": self.notes,
            "works": not self.problems,
        }

    def render(self, width: int = WIDTH) -> str:
        """The screen (report.txt), in lines of `width` characters."""
        return screen(
            __package__,
            "report.txt",
            report=self,
            version=__version__,
            header=HEADER,
            width=width,
            reasons=self._reasons(),
            runs=next((recipe.runs for recipe in self.recipes if recipe.name == self.default), ""),
        )

    def _reasons(self) -> list[tuple[str, str]]:
        """The recipes that are emulated for each reason ("all" of them), and the reason."""
        emulated = [recipe for recipe in self.recipes if "emulated" in recipe.runs]
        by_reason: dict[str, list[str]] = {}
        for recipe in emulated:
            for why in recipe.why:
                by_reason.setdefault(why.removeprefix("auto: "), []).append(recipe.name)
        return [
            ("all" if len(names) == len(emulated) else ", ".join(names), why)
            for why, names in by_reason.items()
        ]


def examine(
    recipes: Mapping[str, Recipe], default: str, folder: Path, processes: int = 1
) -> DoctorReport:
    """Look at this machine and try all `recipes`.

    Args:
        default: name of the default run's recipe.
        folder: folder that runs would be written to.
        processes: number of processes that try recipes.
    """
    here = device()
    return DoctorReport(
        device=str(here),
        default=default,
        machine=tuple(parts(folder)),
        recipes=check_all(recipes, here, processes),
    )
