"""The CPU kernels below `quantize`: amax, instruction sets, threads, huge offsets."""

import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fp4train.kernels import cpu
from fp4train.kernels.cpu import Machine
from fp4train.quantize import Delayed, Hadamard, QuantSpec
from fp4train.quantize.cpu import CpuQuantizer

if (missing := cpu.unavailable()) is not None:
    # tests/house/test_skips.py fails if this must not be skipped
    pytest.skip(missing, allow_module_level=True)

NVFP4 = QuantSpec()
SIGNED = Hadamard()
JOB_BYTES = 192
DECODE_BYTES = 168
MACHINES = [
    Machine(instruction_set=name, threads=threads)
    for name in cpu.instruction_sets()
    for threads in (1, 2, 3)
]


def codes(
    x: Tensor, spec: QuantSpec, machine: Machine, amax: Tensor | None = None
) -> tuple[Tensor | None, ...] | None:
    """(codes, scales, amax), or None where x is not finite."""
    kernels = CpuQuantizer(spec, machine)
    made = kernels.job(x, None, amax, True)
    assert made is not None
    return None if kernels.run(made[0], None, False, kernels.threads(), kernels.isa) else made[1]


def values(
    x: Tensor, spec: QuantSpec, machine: Machine, amax: Tensor | None = None
) -> tuple[Tensor | None, ...] | None:
    """(values, factor), or None where x is not finite."""
    kernels = CpuQuantizer(spec, machine)
    made = kernels.job(x, None, amax, False)
    assert made is not None
    return None if kernels.run(made[0], None, False, kernels.threads(), kernels.isa) else made[1]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_amax_of_the_tensor_and_of_rows(dtype: torch.dtype, machine: Machine) -> None:
    x = torch.randn(150, 530).to(dtype)
    for y in (x, x.T, x[::2, ::3]):
        tensor = codes(y, NVFP4, machine)
        rows = codes(y, replace(NVFP4, global_scale="row"), machine)
        assert tensor is not None and torch.equal(tensor[2], y.abs().amax().float())
        assert rows is not None and torch.equal(rows[2], y.abs().amax(1, keepdim=True).float())


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_what_is_not_finite_is_reported(machine: Machine) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for bad in (float("inf"), -float("nan")):
            x = torch.randn(150, 530).to(dtype)
            x[149, 529] = bad
            for y in (x, x.T):
                assert codes(y, NVFP4, machine) is None
                assert values(y, NVFP4, machine) is None
            assert codes(x.T, replace(NVFP4, hadamard=SIGNED), machine) is None, (
                "from the amax after the transform"
            )
    for bad in (float("inf"), float("nan")):
        whole = QuantSpec(element="e4m3", scale="fp32", block=(None, None), global_scale=None)
        assert values(torch.ones(4, 16), whole, machine, torch.tensor(bad)) is None, (
            "an amax from elsewhere"
        )


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_a_measured_amax_is_that_of_an_amax_given(machine: Machine) -> None:
    x = torch.randn(150, 530).bfloat16()
    for y, spec in ((x, NVFP4), (x.T, NVFP4), (x.T, replace(NVFP4, hadamard=SIGNED))):
        for result in (codes, values):
            measured, (_, _, amax) = result(y, spec, machine), codes(y, spec, machine)
            given = result(y, spec, machine, amax.clone())
            assert measured is not None and given is not None
            assert all(torch.equal(a, b) for a, b in zip(measured, given, strict=True))


def test_what_the_extension_does_not_take_is_refused_before_it_is_called() -> None:
    kernels = CpuQuantizer(NVFP4)
    refused = [torch.ones(16), torch.ones(2, 16).double(), torch.ones(0, 16), torch.ones(16, 0)]
    for as_codes in (True, False):
        assert all(kernels.job(x, None, None, as_codes) is None for x in refused)
        assert kernels.job(torch.ones(2, 16), None, torch.ones(2), as_codes) is None, (
            "an amax of another size"
        )
        delayed = QuantSpec(
            element="e4m3", scale="fp32", block=(None, None), global_scale=None, delayed=Delayed()
        )
        for spec in (replace(NVFP4, rounding="stochastic"), delayed):
            assert CpuQuantizer(spec).job(torch.ones(2, 16), None, None, as_codes) is None


@pytest.mark.parametrize("field", ["element", "scale", "scale_rounding", "formula"])
def test_a_spec_with_a_name_the_kernels_do_not_know_is_not_packed(field: str) -> None:
    spec = replace(NVFP4)
    object.__setattr__(spec, field, "ue9")
    if field == "element":
        object.__setattr__(spec, "format", replace(spec.format, name="ue9", has_inf=True))
    with pytest.raises((KeyError, ValueError), match="ue9"):
        CpuQuantizer(spec)


def test_machine_refuses_what_the_cpu_lacks() -> None:
    with pytest.raises(ValueError, match="instruction_set='neon': this CPU has plain"):
        Machine(instruction_set="neon")
    with pytest.raises(ValueError, match="threads=0"):
        Machine(threads=0)


def test_plain_c_is_always_there() -> None:
    assert cpu.instruction_sets()[0] == "plain"


def test_threads_are_those_of_torch() -> None:
    """On Linux torch loads an OpenMP runtime, and the kernels must not start another thread
    pool.
    """
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
        "codes, scales = array.array('B', bytes(300 * 504)), array.array('B', bytes(300 * 63))\n"
        "out = array.array('f', [0.0])\n"
        "job = bytes.fromhex(sys.argv[2])\n"
        "import struct\n"
        "address = lambda a: a.buffer_info()[0]\n"
        "job += struct.pack('=6Q4q2i', address(x), 0, address(codes), address(scales), "
        "address(out), 0,"
        " 300, 1000, 1000, 1, 1, 1)\n"
        "assert not module.quantize(job, None, False, 4, 0)\n"
        "print(module.thread_pool(), out[0])\n"
    )
    path = cpu.loaded().__file__
    head = CpuQuantizer(NVFP4).scheme + cpu.NO_RANDOM
    command = [sys.executable, "-c", script, str(path), head.hex()]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
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
    for machine in MACHINES[:: len(MACHINES) // 3]:
        for result in (codes, values):
            for far_form, near_form in ((view, near), (view.T, near.T)):
                expected = result(near_form, NVFP4, machine)
                actual = result(far_form, NVFP4, machine)
                assert expected is not None and actual is not None
                assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_an_extension_of_other_sources_is_refused_and_says_to_rebuild() -> None:
    layout = cpu.LAYOUT, JOB_BYTES, DECODE_BYTES, cpu.FUSED.size
    for built in (
        {},
        {"layout": (cpu.LAYOUT + 1, *layout[1:]), "version": cpu.VERSION},
        {"layout": layout},
    ):
        stale = ModuleType("_cpu")
        vars(stale).update(built)
        assert "built from other sources" in str(cpu._stale(stale)) and "rebuild it" in str(
            cpu._stale(stale)
        )


def test_the_extension_refuses_structs_that_are_not_its_own() -> None:
    extension = cpu.loaded()
    with pytest.raises(ValueError, match=f"a packed job has {JOB_BYTES} bytes"):
        extension.quantize(bytes(JOB_BYTES - 1), None, False, 1, 0)
    with pytest.raises(ValueError, match="a packed job has"):
        extension.decode(bytes(9), 1, 0)
    with pytest.raises(TypeError, match="takes 5 arguments, not 3"):
        extension.quantize(bytes(JOB_BYTES), None, False)
    with pytest.raises(TypeError, match="bytes-like"):
        extension.quantize((1, 2), None, False, 1, 0)


def test_an_address_of_zero_is_refused_instead_of_read() -> None:
    """The address of a tensor without memory, such as DTensor or FakeTensor."""
    extension = cpu.loaded()
    with pytest.raises(TypeError, match="no memory of its own"):
        extension.quantize(bytes(JOB_BYTES), None, False, 1, 0)
    with pytest.raises(TypeError, match="no memory of their own"):
        extension.decode(bytes(DECODE_BYTES), 1, 0)


def test_refuses_an_instruction_set_by_number() -> None:
    with pytest.raises(ValueError, match="lacks the instruction set"):
        cpu.loaded().decode(bytes(DECODE_BYTES), 1, 9)
