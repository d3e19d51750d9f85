"""The keys in which the configurations of runs differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp4train.config.binding import complete, flattened
from fp4train.config.schema import Config
from fp4train.lab.analysis.history import NOT_THE_SAME_RUN

ABSENT = "-"
"""The value of a key that a configuration does not have."""


def differing_values(configs: Sequence[dict[str, Any] | None]) -> dict[str, list[Any]]:
    """Key → the value of each run, for the keys in which they differ; those of the run itself are
    left out.

    A key that a configuration leaves to its class has the default of the class.
    """
    configurations = [config for config in configs if config is not None]
    if len(configurations) < len(configs):
        return {}
    keys = dict.fromkeys(key for config in configurations for key in _flat(config))
    flat = [_flat(_completed(config)) | _flat(config) for config in configurations]
    values_of = {key: [values.get(key, ABSENT) for values in flat] for key in keys}
    return {
        key: values
        for key, values in values_of.items()
        if any(value != values[0] for value in values)
    }


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Values by their full keys, without the sections in which runs of one configuration may
    differ.
    """
    return flattened({key: value for key, value in config.items() if key not in NOT_THE_SAME_RUN})


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its classes."""
    completed = complete(config, Config)
    if isinstance(completed, dict):
        return dict(completed)
    return config


def by_class(differing: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """`differing` with sections of several classes by their names or labels, recipe=NVFP4|BF16.

    Keys in such a section that some runs lack are left out where the others agree on them.
    """
    sections = {
        key.removesuffix("_target_"): values
        for key, values in differing.items()
        if key.endswith("._target_") and len(_present(values)) > 1
    }
    relabelled: dict[str, list[Any]] = {}
    for section, values in sections.items():
        labels = differing.get(f"{section}label", [ABSENT] * len(values))
        classes = [str(value).rpartition(".")[2] for value in values]
        relabelled[section.removesuffix(".")] = [
            name if label in (ABSENT, "") else label
            for name, label in zip(classes, labels, strict=True)
        ]
    for key, values in differing.items():
        named = key.endswith("._target_") or (
            f"{key.rpartition('.')[0]}.label" == key and key[:-5] in sections
        )
        agreed = ABSENT in values and len(_present(values)) < 2 and key.startswith(tuple(sections))
        if not named and not agreed:
            relabelled[key] = values
    return relabelled


def _present(values: list[Any]) -> list[Any]:
    """The different values among those that are there."""
    different: list[Any] = []
    for value in values:
        if value != ABSENT and value not in different:
            different.append(value)
    return different
