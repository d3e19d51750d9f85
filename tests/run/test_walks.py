"""The five ways through the program that docs/layout.md tells are those that calls take."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from command_line import Before, Cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/layout.md").read_text(encoding="utf-8")
HEADINGS = ("A tensor", "policy.last", "A batch", "A swap", "A resume")

Call = tuple[str, str]
"""A file of the package, and a function in it."""


def walk(heading: str) -> list[Call]:
    section = re.search(
        rf"^### {re.escape(heading)}.*?\n\n(.*?)(?=\n### |\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    assert section
    lines = section[1].strip().splitlines()
    found = [re.match(r"\d+\. `([\w/.]+)` `([\w.]+)`: ", line) for line in lines]
    assert len(lines) == 10 and all(found), heading
    return [(match[1], match[2]) for match in found if match]


@contextmanager
def calls_of(named: set[Call]) -> Iterator[list[Call]]:
    """The calls of the functions `named` in this thread, in order."""
    prefix = f"{ROOT / 'fp4train'}/"
    calls: list[Call] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            call = code.co_filename.removeprefix(prefix), code.co_qualname
            if call in named:
                calls.append(call)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def first_missing(steps: list[Call], calls: list[Call]) -> Call | None:
    """The first of the steps that is not called after the one before it; None: all are."""
    coming = iter(calls)
    return next((step for step in steps if step not in coming), None)


@pytest.mark.long
def test_calls_take_the_ways_that_the_page_tells(cli: Cli, before: Before) -> None:
    walks = {heading: walk(heading) for heading in HEADINGS}
    named = {step for steps in walks.values() for step in steps}
    small = ("train.steps=4", "policy.last=0.5", "phases=none")
    before(1, lambda run: cli.raw("swap", "runs/a", "recipe=mxfp8", "at=2"))
    with calls_of(named) as calls:
        assert cli("run.name=a", *small).code == 0
        begun = len(calls)
        assert cli("resume=runs/a", "train.steps=5").code == 0
    for heading, steps in walks.items():
        way = calls[begun:] if heading == "A resume" else calls[:begun]
        assert first_missing(steps, way) is None, heading
