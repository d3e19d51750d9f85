"""Triton kernels against the reference in Triton's CPU interpreter, and how the backend chooses and
refuses.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import interpreted
from needs_triton import needs_triton
from pretended import Machine

from fp4train.quantize import (
    Hadamard,
    Launch,
    QuantSpec,
    RandomKey,
    quantize,
    random_words,
    triton as backend,
    triton_launch,
)
from fp4train.quantize.triton_blocks import tile

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_kernels.py"


@pytest.mark.long
@needs_triton
def test_every_kernel_equals_the_reference_to_the_bit_in_the_interpreter(tmp_path: Path) -> None:
    """All its specs, row-wise, transposed and strided, with NaN, infinities, subnormals and 1e+-30."""
    out = tmp_path / "result.json"
    run = interpreted(str(SCRIPT), "all", "--out", str(out))
    assert out.exists(), run.stdout + run.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row for row in rows if not row["ok"]] == []
    assert len(rows) >= 87
    assert run.returncode == 0


@pytest.mark.long
@needs_triton
def test_kernels_read_the_step_of_a_recorded_graph_from_memory_in_the_interpreter() -> None:
    """One launch, of a key whose own step is another; each kernel that draws random bits, its codes
    and its values.
    """
    code = """
import torch
from fp4train.quantize import Hadamard, QuantSpec, RandomKey, quantizer
from fp4train.quantize.random import write_step_counters
mx = dict(element="e4m3", scale="e8m0", global_scale=None, rounding="stochastic")
whole = mx | dict(scale="fp32", block=(None, None))
specs = [QuantSpec(**each) for each in (
    dict(rounding="stochastic"), dict(rounding="stochastic", hadamard=Hadamard()),
    dict(rounding="stochastic", block=(16, 16)), mx | dict(block=(1, 32)), whole)]
x, counters = torch.randn(17, 48).bfloat16(), torch.zeros(8, dtype=torch.int32)
for spec in specs:
    theirs, ours = quantizer(spec, "cpu", "reference"), quantizer(spec, "cpu", "triton")
    for step in (3, 2**29 - 1):
        write_step_counters(counters, step)
        recorded = RandomKey(seed=5, step=1, layer=7, operand=4, counters=counters)
        key = RandomKey(seed=5, step=step, layer=7, operand=4)
        a, b = ours.codes(x, recorded), theirs.codes(x, key)
        assert torch.equal(a.codes, b.codes), (spec, step)
        assert torch.equal(ours.values(x, recorded).values, theirs.values(x, key).values), (spec, step)
        assert torch.equal(theirs.codes(x, recorded).codes, b.codes), "the reference reads it, too"
        assert not torch.equal(ours.codes(x, RandomKey(seed=5, step=1, layer=7, operand=4)).codes, b.codes)
print("equal")
"""
    run = interpreted("-c", code)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr


@needs_triton
def test_the_interpreter_of_triton_3_6_is_refused_beside_numpy_2_4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails in the midst of a kernel there; compiled kernels are not concerned."""
    assert backend.why_not_interpreted("3.6.0", "2.3.5") is None
    assert backend.why_not_interpreted("3.9.0+git1", "2.4.6") is None
    found = {"triton": "3.6.0", "numpy": "2.4.6"}
    monkeypatch.setattr(backend, "version", found.__getitem__)
    for on, said in ((True, "numpy<2.4"), (False, "x is on cpu")):
        Machine(monkeypatch).interprets_triton(on)
        assert said in str(backend.why_not(QuantSpec(), "cpu"))
    assert backend.why_not(QuantSpec(), "cuda") is None


@needs_triton
def test_a_cpu_tensor_is_refused_with_the_reason() -> None:
    assert "cpu" in str(backend.why_not(QuantSpec(), "cpu"))
    with pytest.raises(ValueError, match="CUDA"):
        quantize(torch.ones(16, 16), QuantSpec(), kernel="triton")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (QuantSpec(four_over_six="mae"), "four_over_six"),
        (QuantSpec(block=(1, 12)), "1xN"),
        (QuantSpec(block=(4, 16)), "1xN"),
        (
            QuantSpec(hadamard=Hadamard(size=64)),
            "hadamard size 64: the kernels take sizes up to 32",
        ),
        (
            QuantSpec(hadamard=Hadamard(signs="step"), rounding="stochastic"),
            "hadamard.signs='step' with global_scale='tensor' has no Triton kernel",
        ),
        (QuantSpec(global_scale=(32, 16), hadamard=Hadamard(size=32)), "spans several scales"),
        (QuantSpec(block=(16, 16), hadamard=Hadamard()), "hadamard"),
        (
            QuantSpec(element="e2m1", block=(None, None), scale="fp32", global_scale=None),
            "no Triton kernel",
        ),
        (
            QuantSpec(element="e4m3", block=(1, None), scale="e8m0", global_scale=None),
            "no Triton kernel",
        ),
        (
            QuantSpec(scale="if4", block=(1, 64)),
            "scale='if4' with block=(1, 64): the kernels take N",
        ),
        (
            QuantSpec(rounding="eden", hadamard=Hadamard(size=128, signs="step"), global_bound=256),
            "rounding='eden' has no Triton kernel (known: nearest, nearest_away, stochastic, sto",
        ),
        (
            QuantSpec(requantises=QuantSpec()),
            "has no Triton kernel (known: None)",
        ),
    ],
)
def test_specs_without_a_kernel_are_refused_by_name(spec: QuantSpec, reason: str) -> None:
    assert reason in str(backend.why_not_spec(spec))


@pytest.mark.parametrize("groups", [1, 3, 8, 33, 96, 256, 5120])
def test_tiles_are_whole_and_waste_little_beyond_a_row(groups: int) -> None:
    rows, across = tile(groups, 256)
    assert rows * across == 256
    assert -(-groups // across) * across - groups < 8


def test_key_words_fit_int32_so_that_no_step_or_seed_recompiles_a_kernel() -> None:
    key = RandomKey(
        seed=2**64 - 1,
        step=2**29 - 1,
        layer=2**32 - 1,
        operand=7,
        row_offset=2**32 - 1,
        col_offset=2**35 - 8,
    )
    assert random_words(key) == (-1, -1, -1, -1, -1, -1)
    assert random_words(None) == (0,) * 6


@needs_triton
def test_what_a_launch_needs_is_worked_out_once_per_kind_of_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each quantisation of a step costs tens of microseconds of Python, while the GPU
    waits.
    """
    made: list[str] = []
    quantizer = backend.TritonQuantizer(QuantSpec(rounding="stochastic"))
    monkeypatch.setattr(Launch, "__call__", lambda *args, **options: None)
    Machine(monkeypatch).interprets_triton(False)
    for name in ("plan_quantize", "plan_amax"):
        plan = getattr(triton_launch, name)

        def noted(*arguments: Any, plan: Any = plan, name: str = name) -> Any:
            made.append(name)
            return plan(*arguments)

        monkeypatch.setattr(triton_launch, name, noted)
    key = RandomKey(seed=1, step=2, layer=3, operand=0)
    x = torch.zeros(64, 48, dtype=torch.bfloat16)
    for step in range(3):
        quantizer.codes(torch.zeros_like(x), RandomKey(seed=1, step=step, layer=3, operand=0))
    assert made == ["plan_quantize", "plan_amax"]
    for other in (x.float(), x[:32], torch.zeros(48, 64, dtype=torch.bfloat16).T):
        made.clear()
        quantizer.codes(other, key)
        assert made == ["plan_quantize", "plan_amax"], (
            "other dtypes, shapes and strides are other launches"
        )
    made.clear()
    quantizer.values(x, key, torch.ones(()))
    assert made == ["plan_quantize"], (
        "values are another launch than codes; a given amax is not measured"
    )


@pytest.mark.long
@needs_triton
def test_codes_of_both_forms_take_one_kernel_beside_that_of_the_amaxes_in_the_interpreter() -> None:
    """For layers whose GEMMs multiply codes, also where ranks give the amaxes; NaN and odd sizes
    included.
    """
    code = """
import torch
from fp4train.precision import MXFP8, NVFP4
from fp4train.quantize import PairQuantizer, QuantSpec, RandomKey, quantizer, swizzle_scales, triton_launch
launched, launch = [], triton_launch.Launch.__call__
def noted(self, *pointers, **words):
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)
triton_launch.Launch.__call__ = noted
keys = [RandomKey(seed=5, step=1, layer=7, operand=i, row_offset=8 * i) for i in (1, 2)]
nvfp4, mxfp8 = NVFP4().table(), MXFP8().table()
x, given = torch.randn(33, 40).bfloat16(), [torch.tensor(3.5), torch.tensor(2.5)]
x[3, 7] = torch.nan
for name, row, column, amaxes, x in (
    ("x", nvfp4["fprop"].first, nvfp4["wgrad"].second, (None, None), x[4:]),
    ("dy", nvfp4["dgrad"].first, nvfp4["wgrad"].first, (None, None), x),
    ("ranks", nvfp4["dgrad"].first, nvfp4["wgrad"].first, given, x[4:]),
    ("without transform", QuantSpec(), QuantSpec(), (None, None), x[4:]),
    ("ranks, without transform", QuantSpec(), QuantSpec(), given, x[4:]),
    ("mxfp8", mxfp8["fprop"].first, mxfp8["wgrad"].second, (None, None), x),
    ("mxfp8, strided", mxfp8["fprop"].first, mxfp8["wgrad"].second, (None, None), x[:, ::2]),
    ("whole tiles", nvfp4["dgrad"].first, nvfp4["wgrad"].first, (None, None), torch.randn(256, 128)),
):
    kernels = [quantizer(spec, "cpu", "triton") for spec in (row, column)]
    in_tiles = PairQuantizer(*[each.in_tiles for each in kernels], row_codes=True, column_codes=True)
    tiled = in_tiles(x, keys[0], amaxes[0], keys[1], amaxes[1])
    launched.clear()
    both = PairQuantizer(*kernels, row_codes=True, column_codes=True)
    made = both(x, keys[0], amaxes[0], keys[1], amaxes[1])
    for plain, each in zip(made, tiled):
        assert each.tiled and torch.equal(each.scales.view(torch.uint8), swizzle_scales(plain.scales)), name
        assert torch.equal(each.codes.view(torch.uint8), plain.codes), name
        assert torch.equal(each.dequantize().nan_to_num(), plain.dequantize().nan_to_num()), name
    for spec, each, key, amax, ours in zip((row, column), (x, x.T), keys, amaxes, made):
        theirs = quantizer(spec, "cpu", "reference").codes(each, key, amax)
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scales, theirs.scales), name
        for a, b in ((ours.amax, theirs.amax), (ours.global_decode(), theirs.global_decode())):
            assert a is b or torch.equal(a.nan_to_num(), b.nan_to_num()), name
        assert launched[-1] != "quantize_both" or (ours.factor is None) == (ours.amax is None), name
        factors = [each.global_decode() for each in (ours, theirs)]
        assert (ours.factor is None) is (factors[1] is None), name
        assert factors[1] is None or torch.equal(*(each.nan_to_num() for each in factors)), name
    print(name, *launched, sep=": ")
"""
    run = interpreted("-c", code)
    assert run.stdout.splitlines() == [
        "x: amax_both: quantize_both",
        "dy: amax_both: quantize_both",
        "ranks: quantize_both",
        "without transform: amax_tensor: quantize_both",
        "ranks, without transform: quantize: quantize",
        "mxfp8: quantize_both",
        "mxfp8, strided: quantize: quantize",
        "whole tiles: amax_both: quantize_both",
    ], run.stdout + run.stderr


@pytest.mark.long
@needs_triton
def test_codes_by_one_scale_and_their_transpose_equal_the_reference_in_the_interpreter() -> None:
    """Odd sizes, strides, dtypes, what is not finite; an amax from elsewhere, and one that becomes
    the larger one.
    """
    code = """
import itertools, torch
from gpu_cases import content
from gpu_kernels import difference
from fp4train.quantize import Delayed, PairQuantizer, QuantSpec, quantizer
views = (lambda x: x, lambda x: x.T, lambda x: x[:, ::2], lambda x: x[1:, 3:])
kinds, elements = ("wide", "normal", "nan", "inf", "huge", "tiny", "grid"), ("e4m3", "e5m2")
for count, (kind, view, element, given) in enumerate(itertools.product(kinds, views, elements, (None, 3.0, torch.inf))):
    x = view(content(kind, 77, 142, count).to((torch.bfloat16, torch.float32, torch.float16)[count // 3 % 3]))
    amax, newest, delayed = (None,) * 3 if given is None else (*torch.tensor([given, 0.5]).unbind(), Delayed(margin=1))
    spec = QuantSpec(element=element, block=(None, None), scale="fp32", global_scale=None, delayed=delayed)
    ours, theirs = [PairQuantizer(each, each, row_codes=True, column_codes=True) for each in (
        quantizer(spec, "cpu", "triton"), quantizer(spec, "cpu", "reference"))]
    assert ours.one_kernel and not theirs.one_kernel and ours.joins is (given is not None)
    made, wanted = ours(x, None, amax, None, amax, newest), theirs(x, None, amax, None, amax)
    largest = None if given is None else torch.maximum(x.abs().amax().float(), torch.tensor(0.5))
    for a, b in zip((*made[0], *made[1], newest), (*wanted[0], *wanted[1], largest)):
        assert a == b if not isinstance(b, torch.Tensor) else difference(a, b) is None, (kind, x.shape, element, given)
print(count + 1)
"""
    run = interpreted("-c", code)
    assert run.stdout.strip() == "168", run.stdout + run.stderr


@needs_triton
def test_codes_behind_the_groups_of_a_transform_are_those_of_zero_in_the_interpreter() -> None:
    """Blocks of 32 over groups of 16 neighbours, which end in the midst of the last block."""
    code = """
import torch
from fp4train.quantize import Hadamard, QuantSpec, quantizer
x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
for scale in ("fp32", "e8m0"):
    signs = Hadamard(signs="random", seed=3)
    spec = QuantSpec(element="e4m3", block=(1, 32), scale=scale, global_scale=None, hadamard=signs)
    ours, theirs = (quantizer(spec, "cpu", kernel).codes(x) for kernel in ("triton", "reference"))
    assert torch.equal(ours.codes, theirs.codes), (ours.codes - theirs.codes).nonzero()
print("equal")
"""
    run = interpreted("-c", code)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr


@pytest.mark.long
@needs_triton
def test_fp8_per_tensor_and_row_are_decoded_after_the_triton_kernels_in_the_interpreter() -> None:
    """Backward decodes what forward kept: A100s emulate FP8, and there is no decoding kernel for
    these specs.
    """
    code = """
import torch
from fp4train.quantize import QuantSpec, quantizer
from fp4train.backends import BACKENDS
from fp4train.quantize import quantize
x = torch.randn(33, 48).bfloat16()
for block in ((None, None), (1, None)):
    spec = QuantSpec(element="e4m3", block=block, scale="fp32", global_scale=None)
    kernel = quantizer(spec, "cpu", "triton")
    codes, wanted = kernel.codes(x), quantize(x, spec, kernel="reference")
    assert torch.equal(codes.codes, wanted.codes)
    decoded = kernel.decode(codes)
    assert torch.equal(decoded.values, wanted.decoded().values), block
    assert torch.equal(decoded.scale, wanted.decoded().scale), block
print("equal")
"""
    run = interpreted("-c", code)
    assert run.stdout.strip() == "equal", run.stdout + run.stderr


TRAINED = """
import json
import sys
import torch
from recorded_products import Recorder
from fp4train.backends import native
from fp4train.nn import convert, operands, scaling, weight_form, weights
from fp4train.precision import autocast
from fp4train.precision.recipes import MXFP8, NVFP4, FP8Current, FP8Delayed
from fp4train.quantize import quantizer, sharded, triton_launch

launched, entered, launch = [], [], triton_launch.Launch.__call__
def noted(self, *pointers, **words):
    launched.append(self.kernel.fn.__name__)
    if launched[-1] == "quantize_turned" and self.constants["V"].enters:
        entered.append(pointers[5].data_ptr())
    return launch(self, *pointers, **words)
triton_launch.Launch.__call__ = noted

native.why_not_blocks, native.F.scaled_mm = lambda *_: None, Recorder()

def choose(kernel):
    for module in (operands, scaling, sharded, weight_form, weights):
        module.quantizer = lambda spec, device: quantizer(spec, device, kernel)

def trained(recipe):
    torch.manual_seed(0)
    model = convert(torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)), backend="native")
    x, found = torch.randn(48, 64).bfloat16().requires_grad_(), []
    for step in range(2):
        x.grad = None
        launched.clear()
        entered.clear()
        with autocast(recipe, step=step):
            y = model(x)
        y.backward(torch.randn(48, 32).bfloat16())
        found += [y, x.grad, model[0].weight.grad]
    state = model[0].scaling_state().items()
    histories = {each.data_ptr() for name, each in state if name.startswith("history")}
    return [each.detach().clone() for each in found], [sorted(launched), histories == set(entered)]

told = {}
for recipe in (FP8Current(), FP8Delayed(history=4), MXFP8(), NVFP4()):
    choose("triton")
    ours, kernels = trained(recipe)
    choose("reference")
    theirs, _ = trained(recipe)
    told[type(recipe).__name__] = [*kernels, all(torch.equal(a, b) for a, b in zip(ours, theirs))]
x, spec = torch.randn(48, 64).bfloat16(), NVFP4().table()["wgrad"].second
x[3, 5] = torch.inf
launched.clear()
for each in (x[4:].T, x.T):
    choose("triton")
    ours = sharded.measure_amax(each, spec)
    choose("reference")
    assert torch.equal(ours, sharded.measure_amax(each, spec))
told["transformed"] = launched
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def trained() -> Any:
    """What is launched for a step of a layer by recipe, whether its outputs and gradients have the
    reference's bits, and what is launched for an amax that ranks share.
    """
    run = interpreted("-c", TRAINED)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("recipe", ["FP8Current", "FP8Delayed"])
def test_codes_with_one_scale_are_measured_and_made_once_for_both_forms(
    trained: Any, recipe: str
) -> None:
    """Of x, w and dy. With delayed scaling the kernel that quantises writes the amax into the
    history.
    """
    amaxes = [] if recipe == "FP8Delayed" else ["amax_tensor"] * 3
    assert trained[recipe] == [[*amaxes, *["quantize_turned"] * 3], True, True]


@needs_triton
@pytest.mark.parametrize(("recipe", "launches"), [("MXFP8", 4), ("NVFP4", 8)])
def test_layers_whose_kernels_write_scales_in_tiles_have_the_bits_of_the_reference(
    trained: Any, recipe: str, launches: int
) -> None:
    """Tokens fill no block and no tile. One kernel per tensor, and one for its amaxes; two for each
    form of w.
    """
    kernels, _, equal = trained[recipe]
    assert equal and len(kernels) == launches, kernels


@needs_triton
def test_an_amax_that_ranks_share_is_one_kernel_also_after_the_hadamard_transform(
    trained: Any,
) -> None:
    assert trained["transformed"] == ["amax_columns"] * 2
