"""docs/audit.md: its program runs and prints what the page says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "audit.md"


def test_the_program_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(program, {})
    expected = re.search(r"print\(report\) +# (.*)", program)
    assert expected is not None
    assert capsys.readouterr().out.strip() == expected[1]
