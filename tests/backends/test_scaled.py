"""Scaled products of GPUs beside those of a CPU: in Triton's interpreter, and with a cuBLAS of a
CPU's memory.
"""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from interpreted import interpreted
from needs_triton import needs_triton
from pretended import Machine
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4train.backends import emulate, matmul, scaled
from fp4train.quantize import Decoded, Launch, triton

SCALES = """
import itertools, torch
from fp4train.backends import emulate, matmul, scaled
from fp4train.quantize import Decoded, triton_launch

def integers(rows, cols, seed):
    return torch.randint(-6, 7, (rows, cols), generator=torch.Generator().manual_seed(seed)).bfloat16()

def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())

one, other, tiny, huge, nan = (torch.tensor(x) for x in (0.1234567, 3.7654321e-3, 2.0**-100, 2.0**100, torch.nan))
edge = torch.tensor(2.0**-126 * (1 + 2**-23)), torch.tensor(1 - 2**-24)
subnormal = torch.tensor(2.0**-140)
pairs = [(one, other), (None, other), (one, None), (tiny, tiny * 1.3), (tiny, one), (huge, huge), (nan, one), edge]
pairs += [(subnormal, None), (subnormal, huge)]
"""


@pytest.mark.long
@needs_triton
def test_a_triton_product_has_the_bits_of_a_cpus_in_the_interpreter() -> None:
    """Odd sizes and whole tiles, both layouts of both operands, scales of tensors and of rows whose
    product is normal or not, a bias, both dtypes of the result, and sums.
    """
    code = (
        SCALES
        + """
products, count = scaled.ScaledProducts(), 0
for rows, cols, depth in ((7, 9, 33), (64, 96, 64)):
    a, b = integers(rows, depth, 0), integers(cols, depth, 1)
    of_rows, of_columns = torch.rand(rows, 1) + 0.1, torch.rand(cols, 1) + 0.1
    more = [(of_rows, other), (of_rows, of_columns), (None, of_columns), (one, of_columns)]
    for number, (first, second) in enumerate(pairs + more):
        x = a.T.contiguous().T if number % 2 else a
        y = b.T.contiguous().T if number % 3 else b
        left, right, bias = Decoded(x, first), Decoded(y, second), torch.randn(cols)
        total = torch.randn(rows, cols)
        summed = total + matmul(left, right, out_dtype=torch.float32)
        products.add(total, left, right)
        assert same(total, summed), ("sum", rows, first, second)
        for dtype, added in itertools.product((torch.bfloat16, torch.float32), (None, bias)):
            assert scaled.why_not(left, right, dtype) is None
            given = None if added is None else added.to(dtype)
            made = products.product(left, right, out_dtype=dtype, bias=given)
            assert same(made, matmul(left, right, out_dtype=dtype, bias=added)), (rows, first, second, dtype)
            count += 1
print(count)
"""
    )
    run = interpreted("-c", code)
    assert run.stdout.split() == [str(2 * 14 * 4)], run.stdout + run.stderr


@pytest.mark.long
@needs_triton
def test_a_product_of_cublas_has_the_bits_of_a_cpus_and_triton_does_what_one_factor_cannot() -> (
    None
):
    """The launches: cuBLAS's two factors, its product, and programs of Triton that have something
    to do only where the scales have no normal product. Rows and biases are Triton's alone.
    """
    code = (
        SCALES
        + """
from cublas_on_cpu import HANDLE, CublasOnCpu
from fp4train.kernels.cublas import Cublas
stand_in, launched, launch = CublasOnCpu(), [], triton_launch.Launch.__call__
scaled.ScaledProducts._cublas_on = lambda self, device: Cublas(stand_in.library, lambda: HANDLE)
def noted(self, *pointers, **words):
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)
triton_launch.Launch.__call__ = noted
products = scaled.ScaledProducts()
a, b = integers(40, 96, 0), integers(70, 96, 1)
for number, (first, second) in enumerate(pairs):
    x = a.T.contiguous().T if number % 2 else a
    left, right = Decoded(x, first), Decoded(b, second)
    for dtype in (torch.bfloat16, torch.float32):
        made = products.product(left, right, out_dtype=dtype)
        assert same(made, matmul(left, right, out_dtype=dtype)), (first, second, dtype)
    total = torch.ones(40, 70)
    summed = total + matmul(left, right, out_dtype=torch.float32)
    products.add(total, left, right)
    assert same(total, summed), (first, second)
assert launched == ["product_factors", "scaled_product"] * (3 * len(pairs)), launched
assert len(stand_in.products) == 3 * len(pairs)
launched.clear()
for number, (first, second) in enumerate(pairs):
    other = pairs[(number * 5 + 1) % len(pairs)]
    left, right = (Decoded(a, first), Decoded(b, second)), (Decoded(b, other[1]), Decoded(a, other[0]))
    expected, turned = (matmul(*pair, out_dtype=torch.bfloat16) for pair in (left, right))
    out, total = torch.empty_like(expected), torch.empty_like(turned)
    assert products.both(left, out, right, total, adds=False)
    assert same(out, expected) and same(total, turned), (first, second, other)
    total = torch.ones(70, 40)
    summed = total + matmul(*right, out_dtype=torch.float32)
    assert products.both(left, out, right, total, adds=True) and total._version
    assert same(out, expected) and same(total, summed), (first, second, other)
rows = Decoded(a, torch.ones(40, 1)), Decoded(b, one)
assert not products.both(rows, out, right, total, adds=False)
assert launched == ["two_product_factors", "two_scaled_products"] * (2 * len(pairs)), launched
launched.clear()
scale, factor = pairs[0][1], torch.stack([pairs[0][0] * pairs[0][1], torch.tensor(0.0)])
left, right = Decoded(a, one), Decoded(b, scale, (one, factor))
made = products.product(left, right, out_dtype=torch.bfloat16)
assert same(made, matmul(left, right, out_dtype=torch.bfloat16))
assert launched == ["scaled_product"], "the factor is written with the second operand"
launched.clear()
stand_in.products[3 * len(pairs):] = []
products.product(Decoded(a, torch.ones(40, 1)), Decoded(b, one), out_dtype=torch.bfloat16)
products.product(Decoded(a, one), Decoded(b, one), out_dtype=torch.bfloat16, bias=torch.ones(70).bfloat16())
products.product(Decoded(a[:, ::2], one), Decoded(b[:, ::2], one), out_dtype=torch.bfloat16)
assert launched == ["scaled_product"] * 3 and len(stand_in.products) == 3 * len(pairs)
print("equal")
"""
    )
    run = interpreted("-c", code)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_scales_are_one_factor_with_and_without_a_cpus_instructions(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of all integers below 4096, of which some round otherwise after two factors."""
    number = torch.arange(4096)
    generator = torch.Generator().manual_seed(0)
    a = torch.stack([number // 64, number % 64], 1).bfloat16()
    b = torch.tensor([[64.0, 1.0]] * 3).bfloat16()
    exact = a.float() @ b.float().T
    differ = 0
    for _ in range(100):
        first, second = torch.rand(2, generator=generator).unbind()
        left = Decoded(a, first)
        right = Decoded(b, second)
        bits = (exact * (first * second)).to(dtype)
        for without in ((), (torch.bfloat16,)):
            Machine(monkeypatch).lacks_instructions_for(*without)
            assert torch.equal(matmul(left, right, out_dtype=dtype), bits)
        differ += int((((exact * first) * second).to(dtype) != bits).sum())
    assert differ


@pytest.mark.long
@needs_triton
def test_sums_with_infinite_products_are_those_of_a_cpu_and_a_bias_is_read_where_it_lies() -> None:
    """Where scales have no normal product, too; finite, infinite and NaN numbers are added to, once
    and again.
    """
    code = (
        SCALES
        + """
from cublas_on_cpu import HANDLE, CublasOnCpu
from fp4train.kernels.cublas import Cublas
scaled.ScaledProducts._cublas_on = lambda self, device: Cublas(CublasOnCpu().library, lambda: HANDLE)
products, inf, nan = scaled.ScaledProducts(), float("inf"), float("nan")
a, b = integers(37, 40, 0), integers(33, 40, 1).abs() + 1
a[3, 5], a[4, 6], a[5, 7], a[6, 1] = inf, -inf, nan, inf
b[2, 3], b[7, 6] = inf, -inf
for first, second in ((tiny, tiny), (huge, huge), (one, other), (subnormal, None), (torch.tensor(0.0), one)):
    left, right = Decoded(a, first), Decoded(b, second)
    total = torch.ones(37, 33)
    total[:, 8:16], total[:, 16:24], total[:, 24:28] = inf, -inf, nan
    for _ in range(2):
        summed = total + matmul(left, right, out_dtype=torch.float32)
        products.add(total, left, right)
        assert torch.equal(total.isnan(), summed.isnan()), (first, second, "NaN")
        assert torch.equal(total.nan_to_num(0, inf, -inf), summed.nan_to_num(0, inf, -inf)), (first, second)
products = scaled.ScaledProducts("triton")
left, right = Decoded(integers(8, 16, 0), one), Decoded(integers(8, 16, 1), other)
for bias in (torch.arange(16.0)[::2], torch.tensor(3.0).expand(8), torch.arange(8.0)):
    product = products.product(left, right, out_dtype=torch.float32, bias=bias)
    assert same(product, matmul(left, right, out_dtype=torch.float32, bias=bias)), bias
print("equal")
"""
    )
    run = interpreted("-c", code)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr


def test_why_triton_makes_the_products_of_a_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    capturing = [True]
    refused = Mock(side_effect=RuntimeError("torch has not loaded libcublas.so.99"))
    library = Mock(load=refused)
    Machine(monkeypatch).has_torch_for(
        "13.0",
        device=lambda device: nullcontext(),
        is_current_stream_capturing=lambda: capturing[0],
    )
    monkeypatch.setattr(scaled, "cublas", library)
    products = scaled.ScaledProducts()
    assert "captured" in str(products.why_triton(gpu)) and not refused.called
    capturing[0] = False
    assert products.why_triton(gpu) == "torch has not loaded libcublas.so.99"
    assert scaled.ScaledProducts("triton").why_triton(gpu) == "cuBLAS is not asked"
    assert products.why_triton(torch.device("cpu")) == "cuBLAS does not run on cpu"
    library.load = Mock()
    assert scaled.ScaledProducts().why_triton(gpu) is None


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    products = scaled.ScaledProducts()
    scale = torch.tensor(1.0)
    left, right, short = (
        Decoded(torch.ones(*shape).bfloat16(), scale) for shape in ((4, 16), (6, 16), (6, 8))
    )
    with pytest.raises(
        ValueError, match=r"operands \(4, 16\) and \(6, 8\) differ in their columns"
    ):
        products.product(left, short, out_dtype=torch.bfloat16)
    for bias in (torch.ones(5), torch.ones(4), torch.ones(6, 1), torch.tensor(1.0)):
        with pytest.raises(
            ValueError, match=r"a bias of shape \(.*\) does not fit operand b \(6, 16\)"
        ):
            products.product(left, right, out_dtype=torch.bfloat16, bias=bias.bfloat16())
    for total in (torch.ones(6, 4), torch.ones(4, 5), torch.ones(24)):
        with pytest.raises(
            ValueError,
            match=r"shape \(.*\) does not fit operands \(4, 16\) and \(6, 16\): \(4, 6\)",
        ):
            products.add(total, left, right)
    for total in (torch.ones(6, 4).T, torch.ones(4, 6).bfloat16()):
        with pytest.raises(ValueError, match="contiguous float32, not to"):
            products.add(total, left, right)


def test_what_no_kernel_multiplies_is_said() -> None:
    x = torch.ones(4, 4)
    scale = torch.tensor(1.0)
    bf16 = Decoded(x.bfloat16(), scale)
    wide = Decoded(x, scale)
    assert (
        scaled.why_not(wide, bf16, torch.bfloat16)
        == "the operands are torch.float32 and torch.bfloat16"
    )
    assert scaled.why_not(bf16, bf16, torch.float16) == "the result is torch.float16"
    for odd in (torch.ones(1, 1), torch.ones(4, 2)[:, :1], torch.ones(4, 1).double()):
        assert "a scale is" in str(scaled.why_not(Decoded(x.bfloat16(), odd), bf16, torch.bfloat16))
    plain = Decoded(x.bfloat16(), None)
    assert scaled.why_not(plain, plain, torch.bfloat16) == "there are no scales"


@pytest.mark.parametrize(
    ("sizes", "steps", "adds", "tile"),
    [
        ((16384, 8192, 2048), (2048, 2048), False, (128, 256, 64, 8)),
        ((16384, 8192, 2048), (2048, 2048), True, (128, 128, 32, 8)),
        ((16384, 8192, 2056), (2056, 2056), False, (128, 128, 32, 8)),
        ((512, 2048, 16384), (512, 2048), False, (64, 64, 64, 4)),
    ],
)
def test_a_tile_leaves_no_multiprocessor_idle_where_it_can(
    sizes: tuple[int, int, int],
    steps: tuple[int, int],
    adds: bool,
    tile: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    machine.multiplies_like_a_gpu(cublas=None)
    machine.interprets_triton(False)
    assert scaled.tile_of(sizes, steps, adds, torch.device("cpu")) == tile


@needs_triton
@pytest.mark.parametrize("library", [True, False])
def test_emulation_on_a_gpu_applies_scales_and_adds_dw_in_the_product(
    library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without data that are on a GPU: which kernels a layer's products are, and what
    torch multiplies. A sum is written by address, so its version says to autograd that it was.
    """
    launched: list[str] = []
    cublas = Mock(multiply=lambda *arguments: launched.append("cublas"))
    monkeypatch.setattr(
        Launch, "__call__", lambda self, *_, **__: launched.append(self.kernel.fn.__name__)
    )
    machine = Machine(monkeypatch)
    machine.multiplies_like_a_gpu(cublas=cublas if library else None)
    machine.has_torch_for("13.0", get_device_capability=lambda device: (9, 0))
    monkeypatch.setattr(triton, "_capability", lambda device: (9, 0))
    scaled._plan_product.cache_clear()
    with FakeTensorMode():
        a, b = (torch.empty(rows, 64, device="cuda", dtype=torch.bfloat16) for rows in (48, 32))
        scale = torch.empty((), device="cuda")
        left = Decoded(a, scale)
        right = Decoded(b, scale)
        y = emulate.EMULATE.product(left, right, out_dtype=torch.bfloat16)
        total = torch.empty(48, 32, device="cuda")
        emulate.EMULATE.add(total, left, right)
        assert total._version == 1
        assert y.shape == (48, 32) and y.dtype == torch.bfloat16 and y.is_cuda
        by_one_factor = (
            ["product_factors", "cublas", "scaled_product"] if library else ["scaled_product"]
        )
        assert launched == by_one_factor * 2
        launched.clear()
        bias = torch.empty(32, device="cuda")
        rows = torch.empty(48, 1, device="cuda")
        emulate.EMULATE.product(left, right, out_dtype=torch.bfloat16, bias=bias)
        emulate.EMULATE.product(Decoded(a, rows), right, out_dtype=torch.bfloat16)
        assert launched == ["scaled_product"] * 2
        plain = emulate.EMULATE.product(
            Decoded(a, None), Decoded(b, None), out_dtype=torch.bfloat16
        )
        assert launched == ["scaled_product"] * 2 and plain.shape == (48, 32), (
            "torch multiplies without scales"
        )
    scaled._plan_product.cache_clear()
