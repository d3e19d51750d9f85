"""Code is a cost: the package stays within one bound of lines and files, whatever they are for."""

from fnmatch import fnmatchcase

from count_code import BOUND, CAPABILITIES, PACKAGE, TRAINING, by_capability, capability, code_lines, counts

FOUND = counts(PACKAGE)


def test_the_package_keeps_its_bound_of_code() -> None:
    assert sum(FOUND.values()) <= BOUND[0]
    assert len(FOUND) <= BOUND[1]


def test_each_file_counts_for_one_capability() -> None:
    found = by_capability(FOUND)
    assert [sum(column) for column in zip(*found.values(), strict=True)] == [sum(FOUND.values()), len(FOUND)]
    assert set(found) == {*CAPABILITIES, TRAINING}


def test_a_capability_names_files_that_are_there_and_no_other_counts_before() -> None:
    for name, own in CAPABILITIES.items():
        for pattern in own:
            matched = [path for path in FOUND if fnmatchcase(path, pattern)]
            assert any(capability(path) == name for path in matched), f"{name}: {pattern}"


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
