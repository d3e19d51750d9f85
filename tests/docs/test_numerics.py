"""docs/numerics.md matches the code: its snippets print what it shows, its pictures are those that
the script draws.
"""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "numerics.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SNIPPET = re.compile(
    r"^```(python|console)\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "draw_numerics", ROOT / "scripts" / "paper" / "draw_numerics.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(language: str, source: str, names: dict[str, object]) -> str:
    """The output of a snippet; Python snippets share `names`, as if run one after another."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if language == "python":
            exec(compile(source, str(DOCUMENT), "exec"), names)
        else:
            from fp4train.cli import main

            assert source.strip().startswith("$ fp4train ")
            with contextlib.suppress(SystemExit):
                main(source.split()[2:])
    return "".join(line.rstrip() + "\n" for line in output.getvalue().splitlines())


def test_every_snippet_prints_what_the_document_shows() -> None:
    snippets = SNIPPET.findall(TEXT)
    assert len(snippets) == len(re.findall(r"^```(?:python|console)$", TEXT, re.MULTILINE)) > 6
    names: dict[str, object] = {}
    for language, source, shown in snippets:
        assert printed(language, source, names) == shown, source


def test_the_script_draws_the_pictures_that_the_document_shows(
    script: ModuleType, tmp_path: Path
) -> None:
    written = script.draw_all(tmp_path)
    shown = set(re.findall(r"!\[[^\]]+\]\(images/([^)]+)\)", TEXT))
    assert (
        {path.name for path in written}
        == shown
        == {path.name for path in script.IMAGES.glob("*.png")}
    )
    for path in written:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert 5_000 < path.stat().st_size < 120_000
    again = script.save_small(script.draw_grid(), tmp_path / "again.png")
    assert again.read_bytes() == (tmp_path / "e2m1_grid.png").read_bytes(), (
        "the same package draws the same picture"
    )
