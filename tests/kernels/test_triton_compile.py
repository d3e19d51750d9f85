"""The kernels compiled for GPUs that are not there: what exactness and speed rest on is still in
the machine code.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4train.kernels import triton as kernels
from fp4train.optim import rounded
from fp4train.quantize import (
    Delayed,
    Hadamard,
    PairQuantizer,
    QuantSpec,
    RandomKey,
    TritonQuantizer,
    Variant,
    quantize,
    triton_launch,
)

triton = pytest.importorskip(
    "triton", reason="triton is not installed (Linux only: pip install triton)"
)

from compile_triton import compile_launch, launches_of, resources  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip(
        "TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True
    )

KEY = RandomKey(seed=1, step=7, layer=5, operand=3)
RECORDED = RandomKey(seed=1, step=7, layer=5, operand=3, counters=torch.zeros(8, dtype=torch.int32))
NVFP4 = QuantSpec()
STOCHASTIC = QuantSpec(rounding="stochastic")
WGRAD = QuantSpec(rounding="stochastic", hadamard=Hadamard())
SQUARE = QuantSpec(block=(16, 16))
MXFP8 = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
FP8 = QuantSpec(element="e4m3", block=(None, None), scale="fp32", global_scale=None)
DELAYED = replace(FP8, delayed=Delayed())


def _x(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(256, 1024, dtype=dtype)


def both(row: QuantSpec, column: QuantSpec, dtype: torch.dtype = torch.bfloat16) -> object:
    """Codes of both forms; under delayed scaling the amax is known, and that of x enters a
    history.
    """
    quantizers = TritonQuantizer(row).in_tiles, TritonQuantizer(column).in_tiles
    amax, *newest = torch.ones(2).unbind() if row.delayed else (None,)
    make = PairQuantizer(*quantizers, row_codes=True, column_codes=True)
    return make(_x(dtype), KEY, amax, KEY, amax, *newest)


def step_adamw() -> object:
    """One step of AdamW with moments in BF16 on a whole matrix."""
    weight, gradient, first, second = (
        _x(each) for each in (torch.float32,) * 2 + (torch.bfloat16,) * 2
    )
    group = {"betas": (0.9, 0.95), "lr": 1e-3, "weight_decay": 0.1}
    numbers = rounded.numbers_of(torch.ones(1), group, None, torch.zeros(()))
    keys = rounded.Keys(RECORDED, RECORDED, 0)
    decays = rounded.Decays(beta1=0.9, rest1=0.1, beta2=0.95, rest2=0.05, eps=1e-8)
    return rounded.by_triton(
        rounded.SlabTensors(weight, gradient, first, second), keys, numbers, 0, decays
    )


CALLS: dict[str, Callable[[], object]] = {
    "nvfp4 codes": lambda: TritonQuantizer(NVFP4).codes(_x()),
    "nvfp4 stochastic values": lambda: TritonQuantizer(STOCHASTIC).values(_x(), KEY),
    "nvfp4 stochastic values, of a recorded step": lambda: TritonQuantizer(STOCHASTIC).values(
        _x(), RECORDED
    ),
    "wgrad codes": lambda: TritonQuantizer(WGRAD).codes(_x().T, KEY),
    "wgrad values of float32": lambda: TritonQuantizer(WGRAD).values(_x(torch.float32).T, KEY),
    "weights": lambda: TritonQuantizer(SQUARE).codes(_x()),
    "mxfp8 codes": lambda: TritonQuantizer(MXFP8).codes(_x()),
    "mxfp8 codes, columns": lambda: TritonQuantizer(MXFP8).codes(_x(torch.float16).T),
    "fp8": lambda: TritonQuantizer(FP8).codes(_x()),
    "nvfp4 codes of both forms": lambda: both(NVFP4, QuantSpec(hadamard=Hadamard())),
    "gradients: nvfp4 codes of both forms": lambda: both(STOCHASTIC, WGRAD),
    "mxfp8 codes of both forms": lambda: both(MXFP8, MXFP8),
    "nvfp4 codes decoded": lambda: TritonQuantizer(NVFP4).decode(quantize(_x(), NVFP4)),
    "mxfp8 codes decoded": lambda: TritonQuantizer(MXFP8).decode(quantize(_x(), MXFP8)),
    "a step of adamw": step_adamw,
    "fp8 codes of both forms": lambda: both(FP8, FP8),
    "fp8 codes of both forms, delayed": lambda: both(DELAYED, DELAYED),
    "fp8 codes of both forms of float32, delayed": lambda: both(DELAYED, DELAYED, torch.float32),
}

OF_CODES = {"nvfp4": 100, "mxfp8": 100, "fp8": 90}
"""The GPU whose tensor cores multiply the codes; others are compiled for the oldest that is
supported.
"""
COMPILED = [
    (name, next((sm for codes, sm in OF_CODES.items() if re.search(rf"\b{codes}\b", name)), 80))
    for name in CALLS
]


@pytest.fixture(autouse=True, scope="module")
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this module's own, so that each kernel is compiled here, and once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.long
@pytest.mark.parametrize(("name", "capability"), COMPILED)
def test_compiles_without_spills_and_keeps_subnormals_and_ieee_division(
    name: str, capability: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for launch in launches_of(CALLS[name]):
        compiled = compile_launch(launch, capability)
        kernel = launch.launch.kernel.__name__
        found = resources(compiled.asm["cubin"], tmp_path)
        record_property(
            f"{kernel}, SM {capability}",
            f"{found['REG']} registers, {found['STACK']} bytes spilled",
        )
        assert found["STACK"] == found["LOCAL"] == 0, f"{kernel} spills registers: {found}"
        assert found["REG"] * 32 * launch.launch.warps <= 1 << 15, (
            "two programs lie on a multiprocessor at least"
        )
        ptx = compiled.asm["ptx"]
        assert ".ftz" not in ptx, "a flushed subnormal would change codes"
        assert not re.search(r"div\.(full|approx)|(rcp|sqrt)\.approx", ptx), (
            "approximations would change scales"
        )
        assert capability >= 89 or "cvt.rn.satfinite" not in ptx, "SM 8.0 has no FP8 cast"


def functions() -> dict[str, Any]:
    """Kernels and their functions, by their names."""
    folder = Path(kernels.__file__).parent
    modules = [
        import_module(f"{kernels.__name__}.{path.stem}") for path in sorted(folder.glob("[!_]*.py"))
    ]
    return {
        name: each
        for module in modules
        for name, each in vars(module).items()
        if hasattr(each, "arg_names")
    }


def test_functions_pass_each_other_what_triton_3_6_makes_constants_of() -> None:
    """Its `call_JitFunction` (compiler/code_generator.py) wraps neither a text that is a
    parameter's default or a field of a variant, nor any field of a variant within a tuple, and
    fails with "no attribute 'type'".
    """
    constants = (Variant, *(field.type for field in fields(Variant) if is_dataclass(field.type)))
    texts = {field.name for kind in constants for field in fields(kind) if field.type is str}
    assert {"rounding", "output"} <= texts
    for name, each in functions().items():
        assert not any(
            isinstance(p.default, str) for p in inspect.signature(each.fn).parameters.values()
        ), name
        for call in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each.fn)))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute):
                root, *rest = ast.unparse(call.func).split(".")
                called = each.fn.__globals__.get(root)
                called = getattr(called, rest[0], None) if len(rest) == 1 else called
                if hasattr(called, "arg_names"):
                    assert not any(
                        isinstance(argument, ast.Attribute) and argument.attr in texts
                        for argument in call.args
                    ), ast.unparse(call)
                    parts = [
                        part
                        for given in call.args
                        if isinstance(given, ast.Tuple)
                        for part in given.elts
                    ]
                    assert not any(isinstance(part, ast.Attribute) for part in parts), ast.unparse(
                        call
                    )


@pytest.mark.parametrize(
    ("specs", "least"),
    [
        ((NVFP4, QuantSpec(hadamard=Hadamard())), 2 + 2 + 2 * (1 / 2 + 1 / 16)),
        ((STOCHASTIC, WGRAD), 2 + 2 + 2 * (1 / 2 + 1 / 16)),
        ((MXFP8, MXFP8), 2 + 2 * (1 + 1 / 32)),
        ((FP8, FP8), 2 + 2 + 2 * 1),
        ((DELAYED, DELAYED), 2 + 2 * 1),
    ],
    ids=["nvfp4", "gradients in nvfp4", "mxfp8", "fp8, current", "fp8, delayed"],
)
def test_codes_of_both_forms_move_hardly_more_bytes_than_the_least(
    specs: tuple[QuantSpec, QuantSpec], least: float
) -> None:
    """Bytes per element: x once for its amaxes, once for its codes, and the codes.

    The sizes of a launch's tensors are added, as if it moved each once. `quantize_both` reads each
    tile twice, the second time from the cache that the first has filled: what of it leaves the
    cache is not counted. `quantize_turned` reads and writes once.
    """
    arguments = [each for launch in launches_of(lambda: both(*specs)) for each in launch.arguments]
    moved = sum(each.nbytes for each in arguments if isinstance(each, torch.Tensor))
    assert moved <= 1.15 * least * _x().numel()


@pytest.mark.parametrize(
    ("call", "least"),
    [
        ("nvfp4 codes", 2 + 2 + 1 / 2 + 1 / 16),
        ("wgrad codes", 2 + 2 + 1 / 2 + 1 / 16),
        ("weights", 2 + 2 + 1 / 2 + 1 / 256),
        ("mxfp8 codes", 2 + 1 + 1 / 32),
        ("nvfp4 stochastic values", 2 + 2 + 2),
        ("nvfp4 codes decoded", 1 / 2 + 1 / 16 + 2),
        ("mxfp8 codes decoded", 1 + 1 / 32 + 2),
    ],
)
def test_a_kernel_of_one_form_moves_hardly_more_bytes_than_the_least(
    call: str, least: float
) -> None:
    """Bytes per element: x once for its amax where there is one of the tensor, once for its codes,
    and the result.
    """
    arguments = [each for launch in launches_of(CALLS[call]) for each in launch.arguments]
    moved = sum(each.nbytes for each in arguments if isinstance(each, torch.Tensor))
    assert 0 < moved <= 1.15 * least * _x().numel()


def test_a_step_of_adamw_moves_20_bytes_per_weight() -> None:
    """Weight and moments are read and written, the gradient is read; the rest is a few numbers."""
    (launch,) = launches_of(step_adamw)
    given = [each for each in launch.arguments if isinstance(each, torch.Tensor)]
    weight, gradient, first, second = (each.nbytes for each in given[:4])
    moved = 2 * (weight + first + second) + gradient + sum(each.nbytes for each in given[4:])
    assert moved <= 1.01 * 20 * _x().numel()


def test_a_thread_of_adamw_reads_16_bytes_at_a_time_and_draws_for_eight_weights_at_once() -> None:
    """Ten rounds of the generator for each moment, of two products of 64 bits each; only the
    weights, of which eight are 32 bytes, may be exchanged before they are written.
    """
    (launch,) = launches_of(step_adamw)
    ptx = compile_launch(launch, 90).asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 2 + 2 + 1 + 1
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 2 + 1 + 1
    assert ptx.count("bar.sync") <= 1
    assert len(re.findall(r"\bmul\.wide\.u32", ptx)) <= 2 * 10 * 2 + 2


@pytest.mark.long
def test_contiguous_input_is_read_16_bytes_at_a_time() -> None:
    (launch,) = launches_of(lambda: TritonQuantizer(MXFP8).values(_x()))
    ptx = compile_launch(launch, 90).asm["ptx"]
    assert re.search(r"ld\.global\.v4\.b32", ptx)
    assert re.search(r"st\.global\.v4\.b32", ptx)


def test_a_product_and_a_sum_are_not_contracted() -> None:
    """t = x * enc + 0.0 must round twice; the fmas left are those of rounding.py, for 32 elements."""
    (launch,) = launches_of(lambda: TritonQuantizer(NVFP4).values(_x(), amax=torch.ones(())))
    ptx = compile_launch(launch, 90).asm["ptx"]
    assert len(re.findall(r"\badd(\.rn)?\.f32", ptx)) >= 32
    assert len(re.findall(r"\bfma\.rn\.f32", ptx)) == 2 * 32


def test_fp8_is_cast_by_the_hardware_that_can_and_atomics_wait_for_no_memory() -> None:
    (launch,) = launches_of(CALLS["fp8 codes of both forms, delayed"])
    ptx = compile_launch(launch, 89).asm["ptx"]
    assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == 32 // 2
    assert ".relaxed" in ptx and "acq_rel" not in ptx
    assert "cvt.rn.satfinite" not in compile_launch(launch, 80).asm["ptx"]


@pytest.mark.long
def test_bf16_is_not_rounded_before_the_transform_nor_each_result_for_an_amax() -> None:
    """A thread of the amaxes transforms four groups of 16, whose largest alone are rounded."""
    measure, _ = launches_of(CALLS["nvfp4 codes of both forms"])
    assert 1 <= len(re.findall(r"cvt\.rn\.bf16", compile_launch(measure, 90).asm["ptx"])) <= 4


@pytest.mark.long
def test_random_words_are_drawn_where_they_are_used() -> None:
    """A layout conversion would send every word through shared memory: 4 KB are for turning the
    codes over, no more.
    """
    _, launch = launches_of(lambda: TritonQuantizer(WGRAD).codes(_x().T, KEY))
    compiled = compile_launch(launch, 90)
    assert len(re.findall(r"\bbar\.sync", compiled.asm["ptx"])) <= 6


class Jit:
    """Stands in for Triton's JITFunction (`run` gives the compiled kernel) and CompiledKernel
    (triton/runtime/jit.py, triton/compiler/compiler.py: `kernel[grid](*arguments)`, constants among
    them).
    """

    def __init__(self) -> None:
        self.ran: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        compiled = {(6, 1, 1): lambda *arguments: self.ran.append(("compiled", *arguments))}
        return lambda *arguments, **options: (
            self.ran.append(("jit", *arguments, options["V"])) or compiled
        )


def test_a_compiled_kernel_is_launched_without_asking_the_jit_again_unless_it_would_be_another_kernel() -> (
    None
):
    """Triton specialises by classes of arguments and by whether pointers are multiples of 16
    bytes.
    """
    jit = Jit()
    launch = triton_launch.Launch(jit, 6, (3, 4), {"V": "variant"}, dtypes={0: torch.int32})  # type: ignore[arg-type]
    x = torch.zeros(9)
    step = torch.zeros(1)
    for pointer, words, by in (
        (x, (1, 2), "jit"),
        (x[4:], (5, 6), "compiled"),
        (x[1:], (5, 6), "jit"),
        (x[5:], (1, 2), "compiled"),
        (x, (1, step), "jit"),
        (x, (2, step), "compiled"),
        (x, (1, 2), "compiled"),
    ):
        launch(pointer, words=words)
        ran, first, *rest = jit.ran[-1]
        assert (ran, rest) == (by, [3, 4, *words, "variant"])
        assert isinstance(first, torch.Tensor) and first.data_ptr() == pointer.data_ptr()
        assert first.dtype == torch.int32 or first is pointer, "a compiled kernel takes addresses"
