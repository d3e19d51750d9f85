"""Kernels that are compiled here and packed are found where they are unpacked, and what cannot be used is named."""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only: pip install triton)")

import sys

import gpu_check
import gpu_packed
import gpu_recorded
import pack_gpu
import triton
from gpu_packed import Compiler

from fp4train.quantize import QuantSpec, TritonQuantizer

PYTHON = ".".join(platform.python_version_tuple()[:2])
HERE = ["--compiler", sys.executable, "--python", PYTHON, "--triton", triton.__version__]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel is launched, an amax, and no wheel is packed."""

    def record(path: Path, capability: int) -> None:
        launches = gpu_recorded.Launches()
        with gpu_recorded.as_on_a_gpu(launches, gpu_packed.PROCESSORS[capability]):
            TritonQuantizer(QuantSpec()).amax(torch.zeros(64, 96, dtype=torch.bfloat16))
        path.write_text(json.dumps([json.loads(text) for text in launches.texts]))

    monkeypatch.setattr(gpu_packed, "record", record)
    monkeypatch.setattr(pack_gpu, "pack", lambda *_: None)


@pytest.mark.long
def test_packed_kernels_are_found_by_the_check_of_the_capability_they_are_for(
    launched: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "packed"
    cache = tmp_path / "cache"
    assert pack_gpu.main([str(folder), "--kernels", "--sm", "90", *HERE]) == 0
    assert "1 kernels for compute capability 9.0" in capsys.readouterr().out
    machine = {"capability": "9.0"}
    monkeypatch.setattr(gpu_check.Check, "why_no_gpu", lambda check: write_machine(check, machine))
    monkeypatch.setattr(gpu_check, "steps_of", lambda *_: iter(()))
    monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    words = [str(tmp_path / "x"), "--total", "9", "--kernels", str(folder / "kernels.tgz")]
    assert gpu_check.main(words) == 0
    assert "kernels compiled beforehand: 1 found, 0 missing" in capsys.readouterr().out
    (kernel,) = cache.glob("*/amax_tensor.cubin")
    kernel.with_name("__grp__amax_tensor.json").unlink()
    machine["capability"] = "10.0"
    assert gpu_check.main(words) == 0
    assert "none for compute capability 10.0" in capsys.readouterr().out


def write_machine(check: gpu_check.Check, machine: dict[str, Any]) -> None:
    check.out.with_name("x-machine.json").write_text(json.dumps(machine))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"program": "python-of-nobody"}, "python-of-nobody is not there"),
        ({"python": "3.99"}, f"is Python {PYTHON}"),
        ({"triton": "1.2.3"}, f"has Triton {triton.__version__}"),
    ],
)
def test_a_compiler_whose_kernels_would_not_be_found_is_refused(
    changed: dict[str, str], words: str
) -> None:
    fits = {"program": sys.executable, "python": PYTHON, "triton": triton.__version__}
    assert Compiler(**fits).why_not() is None
    reason = Compiler(**(fits | changed)).why_not()
    assert reason is not None and words in reason


def test_an_archive_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(
            [str(tmp_path / "x"), "--total", "9", "--kernels", str(tmp_path / "kernels.tgz")]
        )
    assert ended.value.code == 2 and "kernels.tgz is no file" in capsys.readouterr().err
