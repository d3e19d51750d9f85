"""Products of cuBLAS whose factor lies on the GPU: the factor multiplies the float32 sum, which is
rounded once.

    y [R, S] = f · (a [R, C] · b [S, C]ᵀ) + g · y

torch's products take a factor from the host only, and the scales of quantised operands are on the
GPU, where a host that waits for them would stall. cuBLAS reads f and g from the GPU in its pointer
mode "device". The library is the one that torch has loaded, the handle the one of
`torch.cuda.current_blas_handle()`, with torch's stream and workspace: a CUDA graph records the
product like torch's.

Before it is used on a GPU, `check` compares small products of integers with exact ones.

Sources: cuBLAS's documentation, 2.1.6 (scalar parameters), 2.2 (types), 2.8.13 (cublasGemmEx).
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType."""
_PLAIN = 0
_TRANSPOSED = 1
"""cublasOperation_t."""
_OPPOSITE = {_PLAIN: _TRANSPOSED, _TRANSPOSED: _PLAIN}
"""The operation that reads the transpose."""
_HOST = 0
_DEVICE = 1
"""cublasPointerMode_t."""
_DEFAULT_MATH = 0
_FLOAT32_PARTS = 16
"""cublasMath_t: torch's; partial sums of a long contraction in float32."""
_COMPUTE_32F = 68
_DEFAULT_ALGORITHM = -1
_LARGEST = 2**31 - 1

Layout = tuple[int, int]
"""(operation, leading dimension) of a matrix, as cuBLAS sees it: column by column."""


class Cublas:
    """cuBLAS, as torch uses it.

    Args:
        library: libcublas.
        handle: gives the handle of the current device and stream.
    """

    def __init__(self, library: Any, handle: Callable[[], int]) -> None:
        self._handle = handle
        self._set_pointers = library.cublasSetPointerMode_v2
        self._set_math = library.cublasSetMathMode
        self._multiply = library.cublasGemmEx
        number = ctypes.c_int
        address = ctypes.c_void_p
        for setter in (self._set_pointers, self._set_math):
            setter.argtypes = [address, number]
            setter.restype = number
        matrix = [address, number, number]
        self._multiply.argtypes = [
            address,
            *[number] * 5,
            address,
            *matrix,
            *matrix,
            address,
            *matrix,
            number,
            number,
        ]
        self._multiply.restype = number

    def multiply(self, a_RC: Tensor, b_SC: Tensor, factors: Tensor, out_RS: Tensor) -> None:
        """Set out to f · a·bᵀ + g · out; where g is 0, out is not read.

        The GPU of the tensors becomes the current one, whose handle and stream are used.

        Args:
            a_RC, b_SC: the factors, of one dtype, BF16 or FP16; the rows or the columns of each are
                contiguous.
            factors: f and g, float32 [2].
            out_RS: contiguous, in that dtype or float32.

        Raises:
            RuntimeError: cuBLAS refuses the product.
        """
        if out_RS.is_cuda and out_RS.get_device() != torch.cuda.current_device():
            with torch.cuda.device(out_RS.device):
                return self.multiply(a_RC, b_SC, factors, out_RS)
        (rows, depth), cols = a_RC.shape, b_SC.shape[0]
        dtype = _TYPES[a_RC.dtype]
        out_dtype = _TYPES[out_RS.dtype]
        # Row by row y is yᵀ column by column: [S, R], the product of b [S, C] and aᵀ [C, R].
        b_operation, b_leading = _layout(b_SC)
        a_operation, a_leading = _layout(a_RC)
        handle = self._handle()
        address = factors.data_ptr()
        try:  # an interrupt between two calls leaves torch its modes, too
            _check(self._set_pointers(handle, _DEVICE), "cublasSetPointerMode")
            _check(self._set_math(handle, _FLOAT32_PARTS), "cublasSetMathMode")
            status = self._multiply(
                handle,
                _OPPOSITE[b_operation],
                a_operation,
                cols,
                rows,
                depth,
                address,
                b_SC.data_ptr(),
                dtype,
                b_leading,
                a_RC.data_ptr(),
                dtype,
                a_leading,
                address + factors.element_size(),
                out_RS.data_ptr(),
                out_dtype,
                cols,
                _COMPUTE_32F,
                _DEFAULT_ALGORITHM,
            )
            _check(
                status, f"cublasGemmEx of [{rows}, {depth}] and [{cols}, {depth}] in {a_RC.dtype}"
            )
        finally:
            self._set_pointers(handle, _HOST)
            self._set_math(handle, _DEFAULT_MATH)


def takes(x: Tensor) -> bool:
    """Whether cuBLAS reads the matrix x as it lies: its rows or its columns are contiguous and do
    not overlap.
    """
    rows, cols = x.shape
    row_stride, col_stride = x.stride()
    if col_stride == 1:
        apart = row_stride >= cols or rows == 1
    else:
        apart = row_stride == 1 and (col_stride >= rows or cols == 1)
    return apart and max(*x.shape, *x.stride()) <= _LARGEST


def _layout(x: Tensor) -> Layout:
    """Of a matrix that `takes`: column by column it is its transpose where its rows are
    contiguous.
    """
    rows, cols = x.shape
    if x.stride(1) == 1:
        return _PLAIN, max(x.stride(0), cols)
    return _TRANSPOSED, max(x.stride(1), rows)


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed with status {status} (cublasStatus_t) in {call}")


def load() -> Cublas:
    """cuBLAS as this process has loaded it with torch.

    Raises:
        RuntimeError: it is not there as a library of its own.
    """
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]  # loads it
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        return Cublas(library, torch.cuda.current_blas_handle)
    except (AttributeError, OSError) as error:
        raise RuntimeError(f"torch has not loaded {name}: {error}") from error


def check(cublas: Cublas, device: torch.device) -> None:
    """Compare products of integers, whose sums are exact in float32 and not in BF16, with what they
    must be.

    Raises:
        RuntimeError: one is another, or cuBLAS refuses it.
    """
    rows = 24
    cols = 40
    depth = 72
    places = torch.arange(depth, device=device)
    a = ((torch.arange(rows, device=device)[:, None] * 37 + places * 53) % 201 - 100).bfloat16()
    b = ((torch.arange(cols, device=device)[:, None] * 7 + places) % 11 - 5).bfloat16()
    exact = (a.float()[:, None] * b.float()).sum(2)
    for a_layout, b_layout in ((a, b), (a.T.contiguous().T, b), (a, b.T.contiguous().T)):
        written = torch.full((rows, cols), torch.nan, dtype=torch.bfloat16, device=device)
        cublas.multiply(
            a_layout,
            b_layout,
            torch.tensor([0.3, 0.0], dtype=torch.float32, device=device),
            written,
        )
        added = torch.ones(rows, cols, dtype=torch.float32, device=device)
        cublas.multiply(
            a_layout, b_layout, torch.tensor([0.25, 1.0], dtype=torch.float32, device=device), added
        )
        for product, right in ((written, (exact * 0.3).bfloat16()), (added, 1.0 + exact * 0.25)):
            if not torch.equal(product, right):
                raise RuntimeError(f"cuBLAS gave a wrong product of integers in {product.dtype}")
