"""Tests lie where their code lies: a folder or file of tests/ has the path of what it tests in
fp4train/.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "fp4train"

NO_PACKAGE = {
    "distributed": "runs of several ranks",
    "docs": "the pages and the README",
    "golden": "vectors of NVIDIA's code",
    "helpers": "what several tests share",
    "house": "rules of the whole package",
    "oracles": "this package beside code that is not ours",
    "scripts": "the scripts of the project, and its installation",
    "statistics": "errors as published",
}
"""Folders of tests/ that stand for no folder of the package, and what they hold."""


def folders() -> set[str]:
    return {path.parent.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py")} - {"."}


def test_every_folder_of_tests_has_its_folder_in_the_package_or_a_reason() -> None:
    strange = {folder for folder in folders() if not (PACKAGE / folder / "__init__.py").exists()}
    assert strange == set(NO_PACKAGE), (
        "a folder of tests/ has the name of the folder of fp4train/ that it tests"
    )


def test_every_folder_of_the_package_has_tests_at_its_place() -> None:
    """A folder of tests, or, where one idea needs no folder, a file of its name beside those of its
    neighbours.
    """
    packages = [path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")]
    assert len(packages) > 30
    for folder in packages:
        found = [
            *(TESTS / folder).rglob("test_*.py"),
            *(TESTS / folder.parent).glob(f"test_{folder.name}*.py"),
        ]
        assert found, (
            f"fp4train/{folder} is tested by no folder of its name, and by no test_{folder.name}.py"
        )


def test_a_test_that_is_named_as_a_module_lies_where_the_module_does() -> None:
    for path in TESTS.rglob("test_*.py"):
        folder = path.parent.relative_to(TESTS)
        name = path.name.removeprefix("test_")
        if folder.parts[:1] and folder.parts[0] in NO_PACKAGE:
            continue
        places = {module.parent.relative_to(PACKAGE) for module in (PACKAGE / folder).rglob(name)}
        assert folder in places or not places, (
            f"{path.relative_to(TESTS)} belongs to {', '.join(map(str, places))}"
        )


def test_a_test_beside_the_folders_is_of_a_module_beside_the_packages() -> None:
    for path in TESTS.glob("test_*.py"):
        assert (PACKAGE / path.name.removeprefix("test_")).exists(), path.name


def test_every_helper_is_used() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    for path in (TESTS / "helpers").glob("*.py"):
        words = (
            f"from {path.stem} import",
            f"import {path.stem}",
            f'framework("{path.stem}")',
            f'"{path.name}"',
        )
        assert any(word in text for word in words), path.name
