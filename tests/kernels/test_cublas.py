"""Products of cuBLAS with a factor in memory: what it is asked, and what is refused."""

import pytest
import torch
from cublas_on_cpu import HANDLE, CublasOnCpu

from fp4train.kernels import cublas

CPU = torch.device("cpu")


def integers(rows: int, cols: int, seed: int) -> torch.Tensor:
    return torch.randint(-6, 7, (rows, cols), generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_check_of_products_passes_and_leaves_the_modes_of_torch() -> None:
    stand_in = CublasOnCpu()
    cublas.check(cublas.Cublas(stand_in.library, lambda: HANDLE), CPU)
    assert set(stand_in.products) == {(40, 24, 72)} and len(stand_in.products) == 6
    assert stand_in.modes == {"pointers": 0, "math": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5, 3), (7, 1, 16), (6, 9, 1), (33, 20, 70)])
@pytest.mark.parametrize("layouts", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)])
def test_every_layout_that_is_taken_is_multiplied(
    dtype: torch.dtype, shape: tuple[int, int, int], layouts: tuple[int, int]
) -> None:
    rows, cols, depth = shape
    views = (lambda x: x, lambda x: x.T.contiguous().T, lambda x: torch.cat([x, x], 1)[:, : x.shape[1]])
    a = views[layouts[0]](integers(rows, depth, 0).to(dtype))
    b = views[layouts[1]](integers(cols, depth, 1).to(dtype))
    assert cublas.takes(a) and cublas.takes(b)
    out, total = torch.full((rows, cols), torch.nan, dtype=dtype), torch.ones(rows, cols)
    library = cublas.Cublas(CublasOnCpu().library, lambda: HANDLE)
    library.multiply(a, b, torch.tensor([0.3, 0.0]), out)
    library.multiply(a, b, torch.tensor([0.5, 1.0]), total)
    exact = a.float() @ b.float().T
    assert torch.equal(out, (exact * 0.3).to(dtype))
    assert torch.equal(total, exact * 0.5 + 1)


def test_matrices_that_cublas_cannot_read_are_not_taken() -> None:
    x = integers(8, 8, 0)
    assert not cublas.takes(x[:, ::2]) and not cublas.takes(x[:1].expand(8, 8))


def test_a_status_that_is_no_success_is_an_error_and_the_modes_are_those_of_torch() -> None:
    stand_in = CublasOnCpu()
    stand_in.status = 15
    library = cublas.Cublas(stand_in.library, lambda: HANDLE)
    with pytest.raises(RuntimeError, match=r"status 15 .* in cublasGemmEx of \[4, 8\] and \[6, 8\] in torch.bfloat16"):
        library.multiply(integers(4, 8, 0), integers(6, 8, 1), torch.ones(2), torch.empty(4, 6))
    assert stand_in.modes == {"pointers": 0, "math": 0}


def test_a_library_that_sums_in_the_dtype_of_the_result_is_not_used() -> None:
    stand_in = CublasOnCpu()
    library = cublas.Cublas(stand_in.library, lambda: HANDLE)
    multiply = library.multiply

    def rounded_before(a: torch.Tensor, b: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
        product = torch.empty_like(out, dtype=torch.bfloat16)
        multiply(a, b, torch.tensor([1.0, 0.0]), product)
        out.copy_(product * factors[0] + (out.nan_to_num() * factors[1]))

    library.multiply = rounded_before  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"a wrong product of integers in torch\.bfloat16"):
        cublas.check(library, CPU)


def test_where_torch_has_not_loaded_the_library_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: HANDLE)
    with pytest.raises(RuntimeError, match=r"torch has not loaded libcublas\.so\.99"):
        cublas.load()
