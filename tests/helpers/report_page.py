"""A report's page as tests read it: its elements, their attributes, its text."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from fp4train.lab.report import read_report

VOID = {"meta", "br", "img"}


class Elements(HTMLParser):
    """Every element of a page with its attributes; `text` is what a reader reads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def report(tmp_path: Path, *runs: Path) -> Elements:
    out = tmp_path / "report.html"
    read_report(runs, out).write(out)
    elements = Elements(out.read_text(encoding="utf-8"))
    assert not elements.open, "every element is closed"
    return elements


def links(elements: Elements) -> Iterator[str]:
    for _, attributes in elements.found:
        for key in ("href", "xlink:href", "src", "data", "action", "srcset"):
            if (value := attributes.get(key)) is not None:
                yield value
