"""Products of cuBLAS with a factor in memory: what it is asked, and what is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cublas_on_cpu import HANDLE, CublasOnCpu
from pretended import Machine

from fp4train.kernels import cublas

CPU = torch.device("cpu")


def integers(rows: int, cols: int, seed: int) -> torch.Tensor:
    return torch.randint(
        -6, 7, (rows, cols), generator=torch.Generator().manual_seed(seed)
    ).bfloat16()


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
    views = (
        lambda x: x,
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    )
    a = views[layouts[0]](integers(rows, depth, 0).to(dtype))
    b = views[layouts[1]](integers(cols, depth, 1).to(dtype))
    assert cublas.takes(a) and cublas.takes(b)
    out = torch.full((rows, cols), torch.nan, dtype=dtype)
    total = torch.ones(rows, cols)
    library = cublas.Cublas(CublasOnCpu().library, lambda: HANDLE)
    library.multiply(a, b, torch.tensor([0.3, 0.0]), out)
    library.multiply(a, b, torch.tensor([0.5, 1.0]), total)
    exact = a.float() @ b.float().T
    assert torch.equal(out, (exact * 0.3).to(dtype))
    assert torch.equal(total, exact * 0.5 + 1)


def test_matrices_that_cublas_cannot_read_are_not_taken() -> None:
    x = integers(8, 8, 0)
    assert not cublas.takes(x[:, ::2]) and not cublas.takes(x[:1].expand(8, 8))
    overlapping = x.as_strided((4, 8), (4, 1))
    assert not cublas.takes(overlapping) and not cublas.takes(overlapping.T)
    assert not cublas.takes(x.as_strided((4, 8), (1, 1)))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_check_of_products_does_not_depend_on_torchs_default_dtype(
    default: torch.dtype,
) -> None:
    stand_in = CublasOnCpu()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        cublas.check(cublas.Cublas(stand_in.library, lambda: HANDLE), CPU)
    finally:
        torch.set_default_dtype(before)
    assert len(stand_in.products) == 6


class OnSecondGpu(torch.Tensor):
    """A CPU's tensor that says it is on the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)

    def get_device(self) -> int:
        return 1


def test_a_product_takes_the_handle_of_its_operands_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses the handle of the first GPU, the current one."""
    current = [0]
    entered: list[int] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        entered.append(chosen.index)
        current.append(chosen.index)
        yield
        current.pop()

    functions = {"current_device": lambda: current[-1], "device": device}
    Machine(monkeypatch).has_torch_for(torch.version.cuda, **functions)
    handles = {0: HANDLE - 1, 1: HANDLE}
    library = cublas.Cublas(CublasOnCpu().library, lambda: handles[current[-1]])
    operands = integers(4, 8, 0), integers(6, 8, 1)
    tensors = [x.as_subclass(OnSecondGpu) for x in (*operands, torch.tensor([0.5, 0.0]))]
    out = torch.empty(4, 6)
    library.multiply(*tensors, out.as_subclass(OnSecondGpu))
    assert torch.equal(out, operands[0].float() @ operands[1].float().T * 0.5)
    assert entered == [1] and current == [0]
    current[0] = 1
    library.multiply(*tensors, out.as_subclass(OnSecondGpu))
    assert entered == [1], "a device that is current is not entered"


def test_an_interrupt_while_the_modes_are_set_leaves_those_of_torch() -> None:
    stand_in = CublasOnCpu()
    set_pointers = stand_in.library.cublasSetPointerMode_v2

    def interrupted(handle: int, mode: int) -> int:
        set_pointers(handle, mode)
        if mode:
            raise KeyboardInterrupt
        return 0

    stand_in.library.cublasSetPointerMode_v2 = interrupted
    library = cublas.Cublas(stand_in.library, lambda: HANDLE)
    with pytest.raises(KeyboardInterrupt):
        library.multiply(integers(4, 8, 0), integers(6, 8, 1), torch.ones(2), torch.empty(4, 6))
    assert stand_in.modes == {"pointers": 0, "math": 0}


def test_a_status_that_is_no_success_is_an_error_and_the_modes_are_those_of_torch() -> None:
    stand_in = CublasOnCpu()
    stand_in.status = 15
    library = cublas.Cublas(stand_in.library, lambda: HANDLE)
    with pytest.raises(
        RuntimeError,
        match=r"status 15 .* in cublasGemmEx of \[4, 8\] and \[6, 8\] in torch.bfloat16",
    ):
        library.multiply(integers(4, 8, 0), integers(6, 8, 1), torch.ones(2), torch.empty(4, 6))
    assert stand_in.modes == {"pointers": 0, "math": 0}


def test_a_library_that_sums_in_the_dtype_of_the_result_is_not_used() -> None:
    stand_in = CublasOnCpu()
    library = cublas.Cublas(stand_in.library, lambda: HANDLE)
    multiply = library.multiply

    def rounded_before(
        a: torch.Tensor, b: torch.Tensor, factors: torch.Tensor, out: torch.Tensor
    ) -> None:
        product = torch.empty_like(out, dtype=torch.bfloat16)
        multiply(a, b, torch.tensor([1.0, 0.0]), product)
        out.copy_(product * factors[0] + (out.nan_to_num() * factors[1]))

    library.multiply = rounded_before  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"a wrong product of integers in torch\.bfloat16"):
        cublas.check(library, CPU)


def test_where_torch_has_not_loaded_the_library_its_name_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch).has_torch_for("99.1", current_blas_handle=lambda: HANDLE)
    with pytest.raises(RuntimeError, match=r"torch has not loaded libcublas\.so\.99"):
        cublas.load()
