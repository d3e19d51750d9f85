"""scripts/gpu_bandwidth.py: which products of integers are compared before products are timed."""

import importlib.util

import pytest
from interpreted import interpreted

CODE = """
import torch
import gpu_bandwidth
from cublas_on_cpu import HANDLE, CublasOnCpu
from fp4train.backends.scaled import ScaledProducts
from fp4train.kernels.cublas import Cublas

CPU = torch.device("cpu")
library = Cublas(CublasOnCpu().library, lambda: HANDLE)
multiply = library.multiply
ScaledProducts._cublas_on = lambda self, device: None if self._way == "triton" else library
for way in ("triton", "cublas"):
    gpu_bandwidth.check_integers(ScaledProducts(way), CPU)

def lost(kind):
    # A library that is wrong in one kind of product alone.
    def wrong(a, b, factors, out):
        multiply(a, b, factors, out)
        if kind(a, out):
            out[-1, -1] += 1
    library.multiply = wrong
    try:
        gpu_bandwidth.check_integers(ScaledProducts(), CPU)
    except RuntimeError as error:
        return str(error)

for name, kind in {
    "float16": lambda a, out: a.dtype is torch.float16,
    "adds=True": lambda a, out: out.dtype is torch.float32,
    "turned=True": lambda a, out: a.stride(0) == 1,
    "(33, 17, 40)": lambda a, out: len(a) % 2 == 1,
}.items():
    text = lost(kind)
    assert text and "1 of " in text and name in text, (name, text)
print("told")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)"
)
def test_products_of_integers_are_exact_and_a_library_that_is_wrong_in_one_kind_is_named() -> None:
    run = interpreted("-c", CODE)
    assert run.stdout.strip() == "told", run.stdout + run.stderr
