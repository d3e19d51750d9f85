"""No test keeps a store where another one looks: what lies beside a file that several tests share
is shared too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = "conftest.py"
EXCEPTIONS = {
    "cli/test_launch.py": "a folder that is not there, which a message corrects",
    "cli/test_sample.py": "a folder that a message names",
    "cli/test_width.py": "a folder that a table names",
    "helpers/command_line.py": "token ids, which are kept by the text that they are made of",
}


def shared_fixtures(tree: ast.Module) -> set[str]:
    """The fixtures of a file whose scope is wider than one test."""
    decorated = (
        (n, d) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) for d in n.decorator_list
    )
    return {
        function.name
        for function, decorator in decorated
        if isinstance(decorator, ast.Call)
        and any(keyword.arg == "scope" for keyword in decorator.keywords)
    }


def places(tree: ast.Module, fixtures: set[str]) -> Iterator[str]:
    """Where a file names a place beside the value of one of these fixtures, which it has as an
    argument or an attribute, or in the folder that all tests of a process share.
    """
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    values = fixtures & arguments | {f"self.{name}" for name in fixtures}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            node.attr == "getbasetemp"
            or (node.attr in ("parent", "parents") and ast.unparse(node.value) in values)
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_store_lies_beside_a_shared_file() -> None:
    """Give it a folder of its own: `tmp_path_factory.mktemp(…)`, or a test's `tmp_path`. A finished
    run comes from `finished`.
    """
    trees = {
        path.relative_to(TESTS).as_posix(): ast.parse(text)
        for path in sorted(TESTS.rglob("*.py"))
        if "scope=" in (text := path.read_text("utf-8"))
        or ".parent" in text
        or "getbasetemp" in text
    }
    fixtures = {path: shared_fixtures(tree) for path, tree in trees.items()}
    found = dict[str, list[str]]()
    for path, tree in trees.items():
        folders = [folder.as_posix() for folder in Path(path).parents]
        above = (fixtures.get(f"{folder}/conftest.py", set()) for folder in folders)
        visible = fixtures[ROOT].union(fixtures[path], *above)
        if lines := list(places(tree, visible)):
            found[path] = lines
    strange = {path: lines for path, lines in found.items() if path not in EXCEPTIONS}
    assert not strange, f"{strange}: {test_no_store_lies_beside_a_shared_file.__doc__}"
    assert found.keys() == EXCEPTIONS.keys(), "no exceptions any more"


@pytest.mark.parametrize(
    "body",
    [
        "def trained(self): return self.text.parent / 'finished' / str(len(self.finished))",
        "def runs(text): return text.parent / 'runs'",
        "def file(factory): return factory.getbasetemp() / 'file.json'",
    ],
)
def test_the_rule_sees_what_breaks_it(body: str) -> None:
    fixture = "@pytest.fixture(scope='session')\ndef text(): ...\n"
    tree = ast.parse(fixture + body)
    assert list(places(tree, shared_fixtures(tree)))


def test_the_rule_allows_a_tests_own_folder() -> None:
    own = (
        "def a(tmp_path, factory):\n    factory.mktemp('finished') / 'a'\n    tmp_path.parent / 'b'"
    )
    assert not list(places(ast.parse(own), {"text"}))
