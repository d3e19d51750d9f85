"""Values of both forms of a tensor by one kernel: the bits of the reference, the launches, and the
bytes.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from interpreted import interpreted
from needs_triton import needs_triton

from fp4train.precision import MXFP8, NVFP4
from fp4train.quantize import PairQuantizer, QuantSpec, RandomKey, TritonQuantizer

CODE = """
import torch
from gpu_cases import content
from gpu_kernels import difference
from fp4train.precision import FP8Current, MXFP8, NVFP4
from fp4train.quantize import PairQuantizer, Quantized, RandomKey, quantizer, triton_launch
launched, launch = [], triton_launch.Launch.__call__
def noted(self, *pointers, **words):
    launched.append(self.kernel.fn.__name__)
    return launch(self, *pointers, **words)
triton_launch.Launch.__call__ = noted
keys = [RandomKey(seed=5, step=1, layer=7, operand=i, row_offset=8 * i) for i in (1, 2)]
nvfp4, mxfp8, fp8 = (recipe.table() for recipe in (NVFP4(), MXFP8(), FP8Current()))
pairs = {
    "x of nvfp4": (nvfp4["fprop"].first, nvfp4["wgrad"].second),
    "dy of nvfp4": (nvfp4["dgrad"].first, nvfp4["wgrad"].first),
    "mxfp8": (mxfp8["fprop"].first, mxfp8["wgrad"].second),
    "fp8": (fp8["fprop"].first, fp8["wgrad"].second),
}
given = [torch.tensor(3.5), torch.tensor(2.5)]
wide, nan, inf = content("wide", 33, 40, 1).bfloat16(), content("nan", 40, 72, 2), content("inf", 17, 33, 3).bfloat16()
values, kept, turned = (False, False), (False, True), (True, False)
cases = [
    ("x of nvfp4", values, nan, None), ("x of nvfp4", kept, wide, None), ("x of nvfp4", turned, inf, None),
    ("dy of nvfp4", values, wide, given), ("dy of nvfp4", values, inf, None), ("dy of nvfp4", kept, nan, None),
    ("mxfp8", values, nan, None), ("mxfp8", kept, wide, None), ("fp8", values, inf, None),
]
for name, codes, x, amaxes in cases:
    specs, amaxes = pairs[name], amaxes or (None, None)
    kernels = [quantizer(spec, "cpu", "triton") for spec in specs]
    launched.clear()
    both = PairQuantizer(*kernels, row_codes=codes[0], column_codes=codes[1])
    forms = both(x, keys[0], amaxes[0], keys[1], amaxes[1])
    for spec, side, key, amax, form, coded in zip(specs, (x, x.T), keys, amaxes, forms, codes):
        reference = quantizer(spec, "cpu", "reference")
        where = name, codes, side.shape
        if coded:
            theirs = reference.codes(side, key, amax)
            assert difference(form.codes, theirs.codes) is None, where
            assert difference(form.scales, theirs.scales) is None, where
            assert difference(form.global_decode(), theirs.global_decode()) is None, where
        else:
            theirs = reference.values(side, key, amax)
            assert not isinstance(form, Quantized)
            assert difference(form.values, theirs.values) is None, (where, difference(form.values, theirs.values))
            assert difference(form.scale, theirs.scale) is None, where
    print(name, *launched, sep=": ")
"""


@pytest.mark.long
@needs_triton
def test_values_of_both_forms_take_one_kernel_and_have_the_bits_of_the_reference_in_the_interpreter() -> (
    None
):
    """With codes of the other form, too; odd sizes, what is not finite, amaxes of other ranks."""
    run = interpreted("-c", CODE)
    one = "amax_both: quantize_both"
    two = "quantize_both"
    assert run.stdout.splitlines() == [
        *[f"x of nvfp4: {one}"] * 3,
        f"dy of nvfp4: {two}",
        *[f"dy of nvfp4: {one}"] * 2,
        *[f"mxfp8: {two}"] * 2,
        "fp8: amax_tensor: quantize",
    ], run.stdout + run.stderr


def operands(tensor: str, name: str) -> tuple[QuantSpec | None, QuantSpec | None]:
    """Specs of both forms of x or dy in a recipe."""
    table = {"nvfp4": NVFP4, "mxfp8": MXFP8}[name]().table()
    of_x = (table["fprop"].first, table["wgrad"].second)
    of_dy = (table["dgrad"].first, table["wgrad"].first)
    return of_x if tensor == "x" else of_dy


def make(forms: str, codes: tuple[bool, bool]) -> object:
    """Both forms of an operand of [256, 1024] in BF16; codes: whether each is made as codes."""
    tensor, _, name = forms.split()
    row, column = (TritonQuantizer(spec) for spec in operands(tensor, name) if spec is not None)
    key = RandomKey(seed=1, step=7, layer=5, operand=3)
    both = PairQuantizer(row, column, row_codes=codes[0], column_codes=codes[1])
    return both(torch.zeros(256, 1024, dtype=torch.bfloat16), key, None, key, None)


@needs_triton
@pytest.mark.parametrize(
    ("forms", "codes", "least"),
    [
        ("x of nvfp4", (False, True), 2 + 2 + 2 + 1 / 2 + 1 / 16),
        ("dy of nvfp4", (False, False), 2 + 2 + 2 + 2),
        ("x of mxfp8", (False, True), 2 + 2 + 1 + 1 / 32),
        ("dy of mxfp8", (False, False), 2 + 2 + 2),
    ],
)
def test_both_forms_of_an_emulated_operand_move_hardly_more_bytes_than_the_least(
    forms: str, codes: tuple[bool, bool], least: float
) -> None:
    """Bytes per element: x once for its amaxes and once for its forms, and these; a launch moves
    each tensor once.
    """
    from compile_triton import launches_of

    count = 256 * 1024
    moved = 0
    for launch in launches_of(partial(make, forms, codes)):
        tensors = [argument for argument in launch.arguments if isinstance(argument, torch.Tensor)]
        moved += sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
    assert least * count <= moved <= 1.01 * least * count


@pytest.mark.long
@needs_triton
def test_values_of_both_forms_compile_for_hopper_without_spills(triton_cache: Path) -> None:
    """Of the gradients, whose random words take most registers."""
    from compile_triton import compile_launch, launches_of, resources

    launch = launches_of(partial(make, "dy of nvfp4", (False, False)))[-1]
    compiled = compile_launch(launch, 90)
    used = resources(compiled.asm["cubin"], triton_cache)
    assert launch.launch.kernel.__name__ == "quantize_both"
    assert used["STACK"] == used["LOCAL"] == 0, used
    assert used["REG"] * 32 * launch.launch.warps <= 1 << 15, (
        "two programs lie on a multiprocessor at least"
    )
    assert ".ftz" not in compiled.asm["ptx"]
