"""The report in a browser: on a desktop, on a phone, in the dark, on paper."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, page
from made import write_ranking, write_run, write_sensitivity

from fp4train.lab.report import read_report

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        browser() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
    ),
]

SMUGGLED = '"><img src=http://localhost/x onerror=alert(1)>'
"""Part of every recipe's name: nothing may be requested because of it."""
WIDTHS = (1100, 390)
PLOTS = """[...document.querySelectorAll('figure .scroll')].map(e => e.getBoundingClientRect())
    .map(r => [r.left, r.right, r.height])"""
INK = "getComputedStyle(document.body).color"
PAPER = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 24 runs with long names, errors and studies."""
    folder = tmp_path_factory.mktemp("report")
    runs = [
        write_run(
            folder / f"run-{i}-{'long' * 12}",
            3 + i / 100,
            seed=i,
            recipe=f"R{i}{SMUGGLED}",
            errors=i < 2,
        )
        for i in range(24)
    ]
    write_ranking(runs[0], "nvfp4 policy.keep=[blocks.0,blocks.1] phases=cooldown_fprop")
    write_sensitivity(runs[0])
    out = folder / "report.html"
    read_report(runs, out).write(out)
    return out


@pytest.fixture(scope="module")
def shown() -> Iterator[Page]:
    with page() as opened:
        yield opened


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_its_window_and_every_plot_is_drawn(
    shown: Page, written: Path, width: int, dark: bool
) -> None:
    shown.open(written, width=width, dark=dark)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width, (
        "nothing is wider than the window"
    )
    plots = shown.evaluate(PLOTS)
    assert len(plots) == 5, "curves, ranking, sensitivity, errors of two runs"
    assert all(left >= 0 and right <= width and height > 60 for left, right, height in plots)
    assert shown.evaluate(
        "[...document.images].every(e => e.naturalWidth > 0 && e.alt.length > 40)"
    )
    assert (shown.evaluate(PAPER) == "rgb(255, 255, 255)") is not dark
    assert shown.evaluate(INK) != shown.evaluate(PAPER)
    assert len(shown.screenshot()) > 20_000
    assert shown.requests == [] and shown.complaints == []


def test_every_loss_and_gap_is_on_the_screen_of_a_phone(shown: Page, written: Path) -> None:
    shown.open(written, width=390)
    cells = "[...document.querySelectorAll('#results td')].map(e => e.getBoundingClientRect())"
    assert shown.evaluate(f"{cells}.every(r => r.left >= 0 && r.right <= 390)")
    labels = (
        "[...document.querySelectorAll('#results td:last-child')].map(e => getComputedStyle(e, "
        "'::before').content)"
    )
    assert set(shown.evaluate(labels)) == {'"gap"'}, "each value has its column's name"


def test_it_prints_with_every_part_open(shown: Page, written: Path) -> None:
    shown.open(written, width=1100)
    pdf = shown.pdf()
    assert pdf.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert 4 <= pages <= 30
    drawn = b"".join(_inflated(pdf))
    assert drawn.count(b" re") + drawn.count(b" l\n") > 500, "figures are printed as vectors"
    shown.call("Emulation.setEmulatedMedia", media="print")
    assert shown.evaluate("document.querySelectorAll('details').length") > 2
    hidden = (
        "[...document.querySelectorAll('details table')].filter(e => "
        "!e.getBoundingClientRect().height).length"
    )
    assert shown.evaluate(hidden) == 0, "what is folded on a screen is open on paper"
    assert shown.requests == [] and shown.complaints == []


def test_a_script_that_got_into_the_page_would_not_run(
    shown: Page, written: Path, tmp_path: Path
) -> None:
    smuggled = tmp_path / "smuggled.html"
    text = written.read_text(encoding="utf-8")
    smuggled.write_text(
        text.replace("<main>", "<main><script>document.title='run'</script>"), encoding="utf-8"
    )
    shown.open(smuggled, width=1100)
    assert shown.evaluate("document.title") != "run"
    shown.complaints.clear()  # the browser says that it was refused


def _inflated(pdf: bytes) -> Iterator[bytes]:
    for match in re.finditer(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            yield zlib.decompress(match[1])
        except zlib.error:
            continue
