"""Kernels that are compiled for GPUs that are not there."""

from pathlib import Path

import pytest


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which Triton keeps what it compiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path
