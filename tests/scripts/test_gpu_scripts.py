"""The scripts, as far as a CPU goes: each program imports what it uses, and says how it is called."""

import runpy
import subprocess
import sys
from pathlib import Path

import gpu_kernels
import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(SCRIPTS.rglob("*.py"))}
PROGRAMS = [
    path
    for path, text in TEXTS.items()
    if "__main__" in text
    and ("argparse.Arg" in text or "gpu_results.options" in text)
    and path.name != "gpu_results.py"
]
"""Scripts with options, not modules of theirs."""


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.name)
def test_every_script_still_imports_what_it_uses(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a program, but in this process, which has imported torch already."""
    places = [place for place in sys.path if "tests/helpers" not in place]
    monkeypatch.setattr(sys, "path", [str(script.parent), *places])
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_tensor_keeps_its_strides_on_its_way_to_the_gpu() -> None:
    """A strided view that arrives without gaps would leave the kernels' strides unchecked there."""
    x = torch.zeros(6, 8)
    for view in (x, x.T, x[:, ::2], x.T[:, 1::2]):
        assert gpu_kernels.on(view, "meta").stride() == view.stride()
        assert gpu_kernels.on(view, "cpu") is view
