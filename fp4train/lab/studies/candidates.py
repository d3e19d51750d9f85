"""The candidates of a ranking: every combination of the recipes, policies and phases of a sweep.

    recipe=bf16,nvfp4 policy=last15,all        four candidates, the first of which is the reference
    recipe=nvfp4 policy.last=0,1,2             keys of a section, too; the rest is the run's own

Options and values are those of the command line of `fp4train`; several are separated by commas, as
in Hydra's sweeps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from fp4train.config.binding import bind
from fp4train.config.composition import sections
from fp4train.config.overrides import groups, parse
from fp4train.config.schema import Config, is_entry
from fp4train.config.unknown import check_option
from fp4train.errors import UserError
from fp4train.precision import LayerPolicy, Phase, Recipe
from fp4train.text import near_miss

SECTIONS = ("recipe", "policy", "phases")
FLOOR = {
    "BF16": {"_target_": "fp4train.precision.BF16"},
    "FP32": {"_target_": "fp4train.precision.FP32"},
}
"""Recipes that every ranking has: their gap is what differences of rounding alone come to."""


@dataclass(frozen=True, kw_only=True)
class RecipeCandidate:
    """One entry of a ranking.

    Args:
        name: name that tells it from the others: "nvfp4", "nvfp4 policy=all".
        recipe, policy, phases: plain configuration values.
        asked: False: it is there for the floor of the noise only.
        same: names of others that run every GEMM as this one does.
    """

    name: str
    recipe: Mapping[str, Any]
    policy: Mapping[str, Any]
    phases: Mapping[str, Any]
    asked: bool = True
    same: Sequence[str] = ()

    def applied(self, config: Config) -> Config:
        """`config` with this candidate's recipe, policy and phases.

        Raises:
            UserError: a key or a value that does not fit.
        """
        return replace(
            config,
            recipe=bind(self.recipe, Recipe, "recipe"),
            policy=bind(self.policy, LayerPolicy, "policy"),
            phases=bind(self.phases, Mapping[str, Phase], "phases"),
        )


Axis = tuple[str, list[tuple[str, Any]]]
"""A key of a sweep, and each of its values as it is written and as a plain value."""


def sweep_axes(words: Sequence[str], folders: Iterable[Path] = ()) -> list[Axis]:
    """The keys of a sweep with their values, sections before keys of sections; all options are
    composed once.

    Args:
        words: "recipe=a,b", "policy=…", "phases=…", "policy.last=…".
        folders: folders with the user's own options.

    Raises:
        UserError: a word that is none of these, or names an option that does not exist.
    """
    folders = list(folders)
    written = [_texts(override, folders) for override in parse(list(words))]
    keys = [key for key, _ in written]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise UserError(
            f"{twice[0]}= is given twice: several values are separated by commas, {twice[0]}=A,B"
        )
    composed = sections({key: texts for key, texts in written if key in SECTIONS}, folders)
    axes: list[Axis] = []
    for key, texts in written:
        if key in SECTIONS:
            values = [composed[key, text] for text in texts]
        else:
            values = [parse([f"{key}={text}"])[0].value() for text in texts]
        axes.append((key, list(zip(texts, values, strict=True))))
    # a section is chosen before its keys are set
    return sorted(axes, key=lambda axis: axis[0] not in SECTIONS)


def candidates(
    axes: Sequence[Axis], saved: Mapping[str, Any], baseline: str | None = None
) -> list[RecipeCandidate]:
    """The candidates of a sweep, in its order; those of `FLOOR` come last where the sweep lacks
    them.

    Args:
        saved: sections of the run as plain values, for what the axes do not name.
        baseline: the name of the candidate that comes first, because gaps are to it; None: as the
            sweep has them.

    Raises:
        UserError: `baseline` is the name of no candidate.
    """
    swept = [key for key, values in axes if len(values) > 1]
    entries = []
    for point in product(*([(key, text, value) for text, value in values] for key, values in axes)):
        chosen = {name: saved[name] for name in SECTIONS}
        for key, _, value in point:
            chosen[key.partition(".")[0]] = _with(chosen, key, value)
        shown = {key: text for key, text, _ in point if key in swept or key == "recipe"}
        name = [shown.pop("recipe")] if "recipe" in shown else []
        name += [f"{key}={text}" for key, text in shown.items()]
        entries.append(RecipeCandidate(name=" ".join(name) or "the run's own", **chosen))
    floor = [
        RecipeCandidate(name=name, recipe=recipe, policy=saved["policy"], phases={}, asked=False)
        for name, recipe in FLOOR.items()
    ]
    if baseline is not None:
        names = [candidate.name for candidate in entries]
        if baseline not in names:
            listed = ", ".join(names)
            raise UserError(
                f"baseline={baseline} is no candidate{near_miss(baseline, names)} "
                f"(candidates: {listed})"
            )
        entries.insert(0, entries.pop(names.index(baseline)))
    return [*entries, *floor]


def _texts(override: Override, folders: list[Path]) -> tuple[str, list[str]]:
    """A key, and each of its values as it is written."""
    key = override.key_or_group
    if key.partition(".")[0] not in SECTIONS or override.is_delete():
        raise UserError(
            f"{override.input_line}: a ranking sweeps over {', '.join(SECTIONS)} and their keys"
            f"{near_miss(key, SECTIONS)}"
        )
    if override.is_sweep_override():
        texts = [str(choice) for choice in override.sweep_string_iterator()]
    else:
        texts = []
    texts = list(dict.fromkeys(texts)) or [str(override.input_line).partition("=")[2]]
    # as Hydra's grammar gives them
    texts = [text.lower() if text in ("True", "False") else text for text in texts]
    if key in SECTIONS:
        options = groups(folders)[key]
        for text in texts:
            check_option(key, text, options)
    return key, texts


def _with(sections: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The section of `key` as it is with `value` there."""
    section, dot, subkey = key.partition(".")
    if not dot:
        return dict(value)
    changed = OmegaConf.create(dict(sections[section]))
    if value is None and is_entry(key):
        changed.pop(subkey, None)
    else:
        OmegaConf.update(changed, subkey, value, merge=False, force_add=True)
    updated = OmegaConf.to_container(changed)
    assert isinstance(updated, dict)
    return {str(name): setting for name, setting in updated.items()}
