"""Kernels that are compiled here and packed are found where they are unpacked, and what cannot be used is named."""

import json
import platform
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only: pip install triton)")

import sys

import gpu_check
import gpu_packed
import gpu_recorded
import triton
from gpu_packed import Compiler

from fp4train.quantize import QuantSpec, TritonQuantizer

PYTHON = ".".join(platform.python_version_tuple()[:2])
HERE = {"program": sys.executable, "python": PYTHON, "triton": triton.__version__}


@pytest.mark.long
def test_packed_kernels_are_found_for_the_capability_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two kernels that are launched, an amax and one with the constants of a variant."""

    def record(path: Path, capability: int) -> None:
        launches = gpu_recorded.Launches()
        with gpu_recorded.as_on_a_gpu(launches, gpu_packed.PROCESSORS[capability]):
            TritonQuantizer(QuantSpec()).codes(torch.zeros(64, 96, dtype=torch.bfloat16))
        path.write_text(json.dumps([json.loads(text) for text in launches.texts]))

    monkeypatch.setattr(gpu_packed, "record", record)
    gpu_packed.pack(tmp_path, [90], Compiler(**HERE))
    archive = tmp_path / "kernels.tgz"
    cache = tmp_path / "cache"
    assert "2 found, 0 missing" in gpu_packed.unpack(archive, cache, "9.0")
    assert {path.name for path in cache.glob("*/*.cubin")} == {
        "amax_tensor.cubin",
        "quantize.cubin",
    }
    assert "none for compute capability 10.0" in gpu_packed.unpack(archive, cache, "10.0")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"program": "python-of-nobody"}, "python-of-nobody is not there"),
        pytest.param({"python": "3.99"}, f"is Python {PYTHON}", marks=pytest.mark.long),
        ({"triton": "1.2.3"}, f"has Triton {triton.__version__}"),
    ],
)
def test_a_compiler_whose_kernels_would_not_be_found_is_refused(
    changed: dict[str, str], words: str
) -> None:
    assert Compiler(**HERE).why_not() is None
    reason = Compiler(**(HERE | changed)).why_not()
    assert reason is not None and words in reason


def test_an_archive_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(
            [str(tmp_path / "x"), "--total", "9", "--kernels", str(tmp_path / "kernels.tgz")]
        )
    assert ended.value.code == 2 and "kernels.tgz is no file" in capsys.readouterr().err
