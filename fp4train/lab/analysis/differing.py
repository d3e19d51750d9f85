"""The keys in which the configurations of runs differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp4train.lab.analysis.history import NOT_THE_SAME_RUN

ABSENT = "-"
"""The value of a key that a configuration does not have."""


def differing_values(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key → the value of each run, for the keys in which they differ; those of the run itself are
    left out.

    Args:
        configs: full key → value of each run, with the defaults of its classes.
    """
    values_of = {
        key: [config.get(key, ABSENT) for config in configs]
        for key in dict.fromkeys(key for config in configs for key in config)
        if key.partition(".")[0] not in NOT_THE_SAME_RUN
    }
    return {
        key: values
        for key, values in values_of.items()
        if any(value != values[0] for value in values)
    }


def by_class(differing: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """`differing` with sections of several classes by their names or labels alone,
    recipe=NVFP4|BF16.
    """
    several = [key.removesuffix("._target_") for key in differing if key.endswith("._target_")]
    relabelled: dict[str, list[Any]] = {}
    for key, values in differing.items():
        section = next((name for name in several if key.startswith(f"{name}.")), None)
        if section is None:
            relabelled[key] = values
        elif key == f"{section}._target_":
            labels = differing.get(f"{section}.label", [ABSENT] * len(values))
            relabelled[section] = [
                str(kind).rpartition(".")[2] if label in (ABSENT, "") else label
                for kind, label in zip(values, labels, strict=True)
            ]
    return relabelled
