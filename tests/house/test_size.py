"""Code is a cost: the package stays within a bound of lines and files, which each later capability raised."""

from fnmatch import fnmatchcase

import pytest
from count_code import BOUND, FIRST, LATER, PACKAGE, code_lines, counts, own_counts, part_lines


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    """Code lines of the package's files; counted once, and by no process that only collects these tests."""
    return counts(PACKAGE)


def test_the_package_keeps_its_bound_of_code(found: dict[str, int]) -> None:
    assert sum(found.values()) <= BOUND[0]
    assert len(found) <= BOUND[1]
    assert FIRST[0] <= 23_300 and FIRST[1] <= 235, "only a capability that is new raises the bound"


def test_files_that_no_capability_owns_are_no_more_than_those_that_stood_first(found: dict[str, int]) -> None:
    assert len(found) - sum(len(own_counts(found, each)) for each in LATER.values()) <= FIRST[1]


@pytest.mark.parametrize("name", LATER)
def test_a_capability_raised_the_bound_by_its_own_files_and_parts_at_least(name: str, found: dict[str, int]) -> None:
    """What they have beyond that would be paid by what was there before it."""
    own, parts = own_counts(found, LATER[name]), [part_lines(part) for part in LATER[name].parts]
    assert own or parts, "a raise is tied to code"
    assert sum(own) + sum(parts) <= LATER[name].lines
    assert len(own) <= LATER[name].files


def test_parts_of_capabilities_lie_in_files_of_others() -> None:
    """A definition counts once."""
    parts = [part for each in LATER.values() for part in each.parts]
    patterns = [pattern for each in LATER.values() for pattern in each.own]
    assert len(parts) == len(set(parts))
    assert not [part for part in parts if any(fnmatchcase(part.partition(":")[0], each) for each in patterns)]


def test_own_files_of_capabilities_are_there_and_belong_to_one(found: dict[str, int]) -> None:
    patterns = [pattern for each in LATER.values() for pattern in each.own]
    matched = {pattern: {path for path in found if fnmatchcase(path, pattern)} for pattern in patterns}
    assert all(matched.values()), matched
    assert sum(map(len, matched.values())) == len(set().union(*matched.values()))


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    source = '''"""A module."""

# why
X = (
    1,
)
"""Of X."""


def f():
    """Gives one."""
    return """
    text"""  # twice
'''
    assert code_lines(source) == 3 + 1 + 2
