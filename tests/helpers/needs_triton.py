"""The mark of tests that need Triton, which has wheels for Linux alone. In CI it is there
(tests/house/test_skips.py).
"""

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (Linux only: pip install triton)",
)
