"""docs/numerics.md matches the code: its snippets print what it shows, its pictures are there."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "numerics.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SNIPPET = re.compile(
    r"^```(python|console)\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


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


def test_the_pictures_that_the_document_shows_are_there() -> None:
    shown = set(re.findall(r"!\[[^\]]+\]\(images/([^)]+)\)", TEXT))
    assert shown == {path.name for path in (DOCUMENT.parent / "images").glob("*.png")}
