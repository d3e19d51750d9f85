"""The launches of a training step, counted without a GPU, are those of the page."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (Linux only: pip install triton)")

import gpu_launches

PAGE = Path(gpu_launches.__file__).parents[1] / "benchmarks" / "kernel_instructions.md"


def of_page(recipe: str) -> list[int]:
    """The launches before and after, and those with values kept."""
    rows = (line.split("|") for line in PAGE.read_text("utf-8").splitlines())
    row = next(row for row in rows if len(row) == 6 and row[1].strip().startswith(recipe))
    return [int(cell.replace(",", "")) for cell in row[2:5]]


@pytest.mark.long
def test_steps_launch_as_often_as_the_page_says() -> None:
    bf16 = gpu_launches.of_block(gpu_launches.RECIPES["bf16"])
    for recipe in ("nvfp4", "mxfp8"):
        _, after, kept = of_page(recipe)
        for name, expected in ((recipe, after), (f"{recipe}, values kept", kept)):
            block = gpu_launches.of_block(gpu_launches.RECIPES[name])
            assert gpu_launches.launches_of_step(block, bf16) == expected, name
