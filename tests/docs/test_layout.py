"""docs/layout.md: its tree is the project's, and all paths and functions that it names are there.

That a step takes the path of its last table is a test of `run/test_step.py`.
"""

import re
from pathlib import Path

from shown import blocks

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fp4train"
TEXT = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")


def test_every_place_in_the_tree_exists_and_every_folder_and_file_of_the_package_is_in_it() -> None:
    (tree,) = [block for block in blocks("layout.md", "") if "fp4train/" in block]
    above, named = {0: ROOT}, set()
    for line in filter(str.strip, tree.splitlines()):
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        place = above[depth] / name
        assert place.exists(), place
        above[depth + 1] = place
        named.add(place.relative_to(ROOT).as_posix())
    shown = ("*", "lab/*", "run/*", "nn/*")
    folders = {path.parent for pattern in shown for path in PACKAGE.glob(f"{pattern}/__init__.py")}
    files = {path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
    wanted = {path.relative_to(ROOT).as_posix() for path in folders | files}
    assert wanted <= named, wanted - named


def test_every_path_that_the_tables_name_is_there() -> None:
    names = re.findall(r"`([\w./]+/[\w./]*|[\w/]+\.py)`", TEXT.partition("| what is new |")[2])
    assert len(names) > 20
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for path in PACKAGE.rglob("*")]
    for name in names:
        assert (ROOT / name).exists() or any(path.endswith(f"/{name.rstrip('/')}") for path in paths), name


def test_every_function_of_the_path_of_a_step_is_in_its_file() -> None:
    steps = TEXT.partition("## The path of a step")[2]
    rows = re.findall(r"^\| `(fp4train/[\w/.]+)`.*?\| (.*) \|$", steps, re.MULTILINE)
    assert len(rows) == 7
    for path, what in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_.]+)`", what):
            for part in name.split("."):
                assert f"{'class' if part[0].isupper() else 'def'} {part}" in source, (path, name)
