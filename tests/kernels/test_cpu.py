"""The CPU kernels below `quantize`: amax, instruction sets, threads, huge offsets."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fp4train.kernels import cpu
from fp4train.kernels.cpu import NO_RANDOM, Machine, Request, Scheme, adapter

if (missing := cpu.unavailable()) is not None:
    pytest.skip(missing, allow_module_level=True)  # test_skips.py fails where that must not be

NVFP4 = Scheme(
    element="e2m1",
    scale="e4m3",
    scale_rounding=None,
    formula="te2.14",
    block=(1, 16),
    largest=6.0,
    bound=448.0 * 6.0,
    stochastic=False,
    signs=None,
)
MACHINES = [Machine(instruction_set=name, threads=threads) for name in cpu.instruction_sets() for threads in (1, 2, 3)]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_amax_of_the_tensor_and_of_rows(dtype: torch.dtype, machine: Machine) -> None:
    x = torch.randn(150, 530).to(dtype)
    for y in (x, x.T, x[::2, ::3]):
        assert torch.equal(cpu.amax(y, machine), y.abs().amax().float())
        assert torch.equal(cpu.amax(y, machine, rowwise=True), y.abs().amax(1, keepdim=True).float())


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_amax_propagates_nan_and_infinity(machine: Machine) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = torch.randn(150, 530).to(dtype)
        x[149, 529] = float("inf")
        assert cpu.amax(x, machine).item() == float("inf")
        x[3, 3] = -float("nan")
        assert cpu.amax(x, machine).isnan()
        assert cpu.amax(x.T, machine).isnan()
        nan_or_inf = Request(scheme=replace(NVFP4, signs=5), measure="tensor")
        assert cpu.quantize(x.T, nan_or_inf, machine) is None, "reported, from the amax after the transform"


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_a_measured_amax_is_that_of_an_amax_given(machine: Machine) -> None:
    x = torch.randn(150, 530).bfloat16()
    for y, scheme in ((x, NVFP4), (x.T, NVFP4), (x.T, replace(NVFP4, signs=5))):
        measured = cpu.quantize(y, Request(scheme=scheme, measure="tensor", codes=True), machine)
        assert measured is not None and measured.amax is not None
        given = cpu.quantize(y, Request(scheme=scheme, amax=measured.amax.clone()), machine)
        assert given is not None
        if scheme.signs is None:
            assert torch.equal(measured.amax, y.abs().amax().float())
        for a, b in ((measured.values, given.values), (measured.global_decode, given.global_decode)):
            assert a is not None and b is not None and torch.equal(a, b)


def test_machine_refuses_what_the_cpu_lacks() -> None:
    with pytest.raises(ValueError, match="instruction_set='neon': this CPU has plain"):
        Machine(instruction_set="neon")
    with pytest.raises(ValueError, match="threads=0"):
        Machine(threads=0)


def test_plain_c_is_always_there() -> None:
    assert cpu.instruction_sets()[0] == "plain"


def test_threads_are_those_of_torch() -> None:
    """On Linux torch has an OpenMP runtime loaded, and the kernels must not bring another pool."""
    if sys.platform != "linux":
        pytest.skip("torch's runtime has other names elsewhere")
    assert cpu.thread_pool() == "openmp"


def test_threads_of_their_own_where_no_openmp_is_loaded() -> None:
    """The extension alone, without torch: the same amax from four threads."""
    script = (
        "import array, importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_cpu', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "x = array.array('f', [float(i) for i in range(300000)])\n"
        "out = array.array('f', [0.0])\n"
        "job = (x.buffer_info()[0], 1, 300, 1000, 1000, 1, out.buffer_info()[0], 0)\n"
        "module.amax(job, None, 4, 0)\n"
        "print(module.thread_pool(), out[0])\n"
    )
    path = adapter._cpu().__file__
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["pthreads", "299999.0"]


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """Two rows 2**31 elements apart: only the touched pages of the storage take memory."""
    far = 2**31 + 64
    try:
        storage = torch.empty(far + 1024, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("no address space for 4 GiB")
    near = torch.randn(2, 64).bfloat16()
    view = storage.as_strided((2, 64), (far, 1))
    view.copy_(near)
    request = Request(scheme=NVFP4, amax=torch.tensor(4.0), random=NO_RANDOM, values=True, codes=True)
    expected = cpu.quantize(near, request, Machine())
    assert expected is not None
    for machine in MACHINES[:: len(MACHINES) // 3]:
        actual = cpu.quantize(view, request, machine)
        assert actual is not None
        for a, b in (
            (actual.values, expected.values),
            (actual.codes, expected.codes),
            (actual.scales, expected.scales),
        ):
            assert a is not None and b is not None and torch.equal(a, b)
        assert torch.equal(cpu.amax(view, machine), near.abs().amax().float())
    across = cpu.quantize(view.T, request, Machine())
    assert across is not None and across.values is not None
    again = cpu.quantize(near.T, request, Machine())
    assert again is not None and again.values is not None and torch.equal(across.values, again.values)


def test_refuses_an_instruction_set_by_number() -> None:
    with pytest.raises(ValueError, match="lacks the instruction set"):
        adapter._cpu().decode((0, 0, 1, 1, 1, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0), 1, 9)
