"""cuBLAS on the memory of a CPU: C functions of its names, argument lists and meanings, made of
Python's.

`cublasGemmEx` reads its matrices column by column from addresses, with their leading dimensions, as
cuBLAS's documentation has them, so that a wrong order, operation or leading dimension gives wrong
numbers. Sums are exact in float64, and so are those of integers in float32.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HANDLE = 4711
DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
SET = ctypes.CFUNCTYPE(c_int, c_void_p, c_int)
MATRIX = (c_void_p, c_int, c_int)
GEMM_EX = ctypes.CFUNCTYPE(
    c_int, c_void_p, *[c_int] * 5, c_void_p, *MATRIX, *MATRIX, c_void_p, *MATRIX, c_int, c_int
)


def columns(address: int, rows: int, cols: int, leading: int, dtype: torch.dtype) -> Tensor:
    """The matrix [rows, cols] that lies at `address` column by column; a view of that memory."""
    assert leading >= rows
    count = leading * (cols - 1) + rows
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided((rows, cols), (1, leading))


class CublasOnCpu:
    """Stands in for the library.

    Attributes:
        products: (m, n, k) of each.
        modes: the modes that are set: of pointers, and of arithmetic.
        status: what a product returns; it is made if this is 0.
    """

    def __init__(self) -> None:
        self.products: list[tuple[int, int, int]] = []
        self.modes = {"pointers": 0, "math": 0}
        self.status = 0
        self.library = SimpleNamespace(
            cublasSetPointerMode_v2=SET(self._setter("pointers")),
            cublasSetMathMode=SET(self._setter("math")),
            cublasGemmEx=GEMM_EX(self._multiply),
        )

    def _setter(self, name: str) -> Any:
        def set_mode(handle: int, mode: int) -> int:
            self.modes[name] = mode
            return 0 if handle == HANDLE else 1

        return set_mode

    def _multiply(
        self, handle: int, a_op: int, b_op: int, m: int, n: int, k: int, *rest: Any
    ) -> int:
        alpha, *rest = rest
        (
            a,
            a_dtype,
            a_leading,
            b,
            b_dtype,
            b_leading,
            beta,
            c,
            c_dtype,
            c_leading,
            compute,
            algorithm,
        ) = rest
        right = (
            handle == HANDLE
            and self.modes == {"pointers": 1, "math": 16}
            and (compute, algorithm) == (68, -1)
        )
        if self.status or not right:
            return self.status or 7
        first = columns(a, *((k, m) if a_op else (m, k)), a_leading, DTYPES[a_dtype])
        second = columns(b, *((n, k) if b_op else (k, n)), b_leading, DTYPES[b_dtype])
        product = (first.T if a_op else first).double() @ (second.T if b_op else second).double()
        out = columns(c, m, n, c_leading, DTYPES[c_dtype])
        scaled = product.float() * c_float.from_address(alpha).value
        if (factor := c_float.from_address(beta).value) != 0:
            scaled += factor * out.float()
        out.copy_(scaled)
        self.products.append((m, n, k))
        return 0
