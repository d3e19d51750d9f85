"""Code is a cost: the package stays within a budget of lines and files."""

from pathlib import Path

from count_code import code_lines, counts

import fp4train

LINES, FILES = 24_830, 243
"""A capability that is added raises them by what it needs, and says so where it is described."""


def test_the_package_keeps_its_budget_of_code() -> None:
    found = counts(Path(fp4train.__file__).parent)
    assert sum(found.values()) <= LINES
    assert len(found) <= FILES


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
