"""Families of cases of which a few run in the short suite, and all with --long and in CI."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_but(short: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which those that are not in `short` are marked `long`."""
    values = list(cases)
    missing = [case for case in short if case not in values]
    assert not missing, f"no cases: {missing}"
    return [
        case if case in short else pytest.param(case, marks=pytest.mark.long) for case in values
    ]
