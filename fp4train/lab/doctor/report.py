"""The findings, as one screen for people or as JSON for issue reports."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fp4train import __version__
from fp4train.lab.doctor.machine import Fact, device, parts
from fp4train.lab.doctor.ranks import CollectiveCheck
from fp4train.lab.doctor.recipes import RecipeCheck, check_all
from fp4train.precision.recipe import Recipe
from fp4train.text import columns, screen, tabulate, wrapped

WIDTH = 120
HEADER = ("recipe", "runs here", "quantised by", "codes", "products", "scaled_mm", "native on")


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Everything; `default` is the recipe of the default run, `ranks` the number of processes that
    met.
    """

    device: str
    default: str
    machine: tuple[Fact, ...]
    recipes: tuple[RecipeCheck, ...]
    ranks: int = 1
    collectives: tuple[CollectiveCheck, ...] = ()

    @property
    def problems(self) -> list[str]:
        """Problems that keep the default run from working."""
        found = [f"{part.name}: {part.problem}" for part in self.machine if part.problem]
        found += [each.problem for each in self.collectives if each.problem]
        return found + [
            f"recipe={r.name}: {r.problem}"
            for r in self.recipes
            if r.problem and r.name == self.default
        ]

    @property
    def notes(self) -> list[str]:
        """Parts that something else than the default run lacks."""
        found = [f"{part.name}: {part.note}" for part in self.machine if part.note]
        found += [
            f"recipe={r.name}: {r.problem}"
            for r in self.recipes
            if r.problem and r.name != self.default
        ]
        return found + [
            f"recipe={r.name}: {r.scaled_problem}" for r in self.recipes if r.scaled_problem
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
        header = ("collective", "of", "result", "GB/s per rank")
        return screen(
            __package__,
            "report.txt",
            {"wrapped": partial(_wrapped, width=width)},
            found=self,
            version=__version__,
            machine=columns([(part.name, part.value) for part in self.machine], width=width),
            recipes=tabulate([HEADER, *(_row(each) for each in self.recipes)], width=width),
            collectives=tabulate(
                [header, *(_collective(each) for each in self.collectives)], width=width
            ),
            reasons=self._reasons(),
            runs=next((each.runs for each in self.recipes if each.name == self.default), ""),
        )

    def _reasons(self) -> list[tuple[str, str]]:
        """The recipes that are emulated for each reason ("all" of them), and the reason."""
        emulated = [each for each in self.recipes if "emulated" in each.runs]
        by_reason: dict[str, list[str]] = {}
        for each in emulated:
            for why in each.why:
                by_reason.setdefault(why.removeprefix("auto: "), []).append(each.name)
        return [
            ("all" if len(n) == len(emulated) else ", ".join(n), why)
            for why, n in by_reason.items()
        ]


def _wrapped(text: str, width: int = WIDTH) -> str:
    start, *more = wrapped(text, width - 4, "  ")
    return "\n".join([start, *(f"  {line}" for line in more)])


def _row(each: RecipeCheck) -> tuple[str, ...]:
    codes = {None: "-", True: "equal", False: "DIFFERENT"}[each.codes]
    if each.distance is None:
        products = "FAILED"
    else:
        products = _distance(each.distance)
    scaled = (
        "FAILED" if each.scaled_problem else "-" if each.scaled is None else _distance(each.scaled)
    )
    on = ", ".join(each.native_on) or "-"
    return (each.name, each.runs, ", ".join(each.kernels) or "-", codes, products, scaled, on)


def _collective(each: CollectiveCheck) -> tuple[str, ...]:
    result = {None: "FAILED", True: "equal", False: "DIFFERENT"}[each.correct]
    return (each.name, each.dtype, result, "-" if each.rate is None else f"{each.rate / 1e9:.3g}")


def _distance(found: float) -> str:
    return f"{found:.0e}" if found else "equal"


def examine(
    recipes: Mapping[str, Recipe],
    default: str,
    folder: Path,
    *,
    ranks: int = 1,
    collectives: Sequence[CollectiveCheck] = (),
    processes: int = 1,
) -> DoctorReport:
    """Look at this machine and try all `recipes`.

    Args:
        default: the name of the default run's recipe.
        folder: where runs would be written.
        ranks, collectives: what several processes found together.
        processes: that try recipes.
    """
    here = device()
    return DoctorReport(
        device=str(here),
        default=default,
        machine=tuple(parts(folder)),
        recipes=check_all(recipes, here, processes),
        ranks=ranks,
        collectives=tuple(collectives),
    )
