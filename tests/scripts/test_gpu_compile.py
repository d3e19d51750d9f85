"""Kernels compiled beforehand for a GPU that is not there: another process compiles none of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only: pip install triton)")

from fp4train.quantize import QuantSpec, TritonQuantizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def compile_kernels(*words: str) -> tuple[int, dict[str, int]]:
    """Exit code and counts of `gpu_compile.py`."""
    command = [sys.executable, str(SCRIPTS / "gpu_compile.py"), *words, "--sm", "90"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout, run.stderr
    counts: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return run.returncode, counts


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launch of an amax, as `gpu_recorded.py` writes it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_recorded

    launches = gpu_recorded.Launches()
    with gpu_recorded.as_on_a_gpu(launches, processors=132):
        for _ in range(2):
            TritonQuantizer(QuantSpec()).amax(torch.zeros(64, 96, dtype=torch.bfloat16))
    path = tmp_path / "launches.json"
    path.write_text(json.dumps([json.loads(text) for text in launches.texts]))
    return path


@pytest.mark.long
def test_a_second_process_compiles_nothing_also_where_the_cache_was_carried_to(
    launches: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    carried = tmp_path / "carried"
    words = [str(launches), str(made)]
    assert compile_kernels(*words) == (0, counts(compiled=1))
    assert list(made.glob("*/amax_tensor.cubin"))
    assert compile_kernels(*words) == (0, counts(found=1))
    moved = made.rename(tmp_path / "packed")
    copied = compile_kernels(str(launches), str(carried), "--from", str(moved), "--check")
    assert copied == (0, counts(found=1))
    (launch,) = json.loads(launches.read_text())
    launch["arguments"][0]["dtype"] = "float32"
    launches.write_text(json.dumps([launch]))
    assert compile_kernels(str(launches), str(carried), "--check") == (1, counts(missing=1))


def counts(**numbers: int) -> dict[str, Any]:
    return {"kernels": 1, "compiled": 0, "found": 0, "missing": 0} | numbers
