"""Check the Triton kernels on this machine's GPU; `gpu_bandwidth.py` times them:

    python scripts/gpu_kernels.py first|launched|all|pieces --out FILE [--processes N] [--dry-run]

Every kernel runs against the readable reference, computed on the CPU: codes, scales, amax, values and decoded values,
over specs, shapes, dtypes, strides and bad input. Any difference ends the program with status 1.

    first       one kernel, in this process: NVFP4 with the transform and random bits
    launched    what training runs launch
    all         all specs, and rows of one tensor of more than 2^31 elements, if there is memory for it
    pieces      what recipes of research add

Compiling takes most of the time: Triton's ptxas needs 4 to 20 s for some kernels. So the cases are shared out among
processes, which compile into one cache folder (TRITON_CACHE_DIR). Called again, the program goes on with the cases that
it lacks. Under compute-sanitizer take `--processes 1`, and PYTORCH_NO_CUDA_MEMORY_CACHING=1. On a machine without a GPU
`TRITON_INTERPRET=1` checks exactness in Triton's interpreter, and `--dry-run` some of it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

import gpu_results
import gpu_stand_ins
import torch
from gpu_cases import (
    IN_STEPS,
    KEY,
    PIECES,
    SPECS,
    Case,
    Shapes,
    cases,
    content,
    launched_cases,
    one_form,
)
from torch import Tensor

from fp4train.quantize import (
    Decoded,
    Quantized,
    QuantSpec,
    reference,
    triton as kernels,
)
from fp4train.quantize.triton_amaxes import amaxes, takes

TURNED = KEY.replace(operand=4, row_offset=16, col_offset=8)
"""The key of the form along tokens."""
TINY: Shapes = ((20, 40),)
"""The shape of a dry run."""
SHAPES: Shapes = ((33, 70), (256, 512))
KINDS = ("wide", "normal", "nan", "grid", "inf", "huge", "tiny")
DTYPES = (torch.bfloat16, torch.float32)


def first_case(shapes: Shapes) -> list[Case]:
    x = content("wide", *shapes[-1], seed=1).bfloat16()
    return [Case("first", x, SPECS["nvfp4 hadamard stochastic"], KEY, None)]


CHOICES: dict[str, Callable[[Shapes], Iterable[Case]]] = {
    "first": first_case,
    "launched": launched_cases,
    "all": lambda shapes: cases(shapes=shapes, kinds=KINDS, dtypes=DTYPES),
    "pieces": lambda shapes: one_form({**PIECES, **IN_STEPS}, shapes, KINDS, DTYPES),
}


def on(x: Tensor, device: str) -> Tensor:
    """x on the device with its strides, which `to` keeps only where elements lie without gaps."""
    if device == "cpu":
        return x
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return empty.copy_(x)


def difference(ours: Tensor | None, theirs: Tensor | None) -> str | None:
    """How two results differ in dtype, shape or bits (all NaN are equal); None if they do not."""
    if ours is None or theirs is None:
        return None if ours is theirs else "one is missing"
    ours = ours.cpu()
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    unlike = ours.contiguous().view(integer) != theirs.contiguous().view(integer)
    if ours.dtype.is_floating_point:
        unlike &= ~(ours.isnan() & theirs.isnan())
    places = unlike.nonzero().tolist()
    if not places:
        return None
    place = tuple(places[0])
    values = f"{ours[place]}, not {theirs[place]}"
    return f"{len(places)} of {ours.numel()} differ, first at {list(place)}: {values}"


class Differences(dict[str, str]):
    """What differs → how."""

    def compare(self, what: str, ours: Tensor | None, theirs: Tensor | None) -> None:
        text = difference(ours, theirs)
        if text is not None:
            self[what] = text

    def compare_codes(self, form: str, ours: object, theirs: Quantized) -> None:
        """Codes, and what belongs to them."""
        assert isinstance(ours, Quantized)
        self.compare(f"codes{form}", ours.codes.view(torch.uint8), theirs.codes)
        self.compare(f"scales{form}", ours.block_scales(), theirs.block_scales())
        self.compare(f"amax{form}", ours.amax, theirs.amax)
        self.compare(f"S_dec{form}", ours.global_decode(), theirs.global_decode())

    def compare_values(self, form: str, ours: object, theirs: Decoded) -> None:
        assert isinstance(ours, Decoded)
        self.compare(f"values{form}", ours.values, theirs.values)
        self.compare(f"scale{form}", ours.scale, theirs.scale)

    def compare_factors(self, form: str, ours: object, theirs: Decoded, other: Tensor) -> None:
        """Values with the factors of a product with an operand of the scale `other`."""
        self.compare_values(f"{form} beside factors", ours, theirs)
        assert isinstance(ours, Decoded) and ours.factors is not None and theirs.scale is not None
        product = theirs.scale * other.cpu()
        normal = (product >= torch.finfo(torch.float32).tiny) & (product < torch.inf)
        factor = torch.where(normal | product.isnan(), product, 0.0)
        self.compare(f"factors{form}", ours.factors[1], torch.stack([factor, torch.zeros(())]))


def check(case: Case, device: str) -> dict[str, str]:
    """Differences between the kernels and the reference; empty if there are none."""
    x = on(case.x, device)
    amax = None if case.amax is None else case.amax.to(device)
    if reason := kernels.why_not(case.spec, x.device.type) or kernels.why_not_tensor(x):
        return {"why_not": reason}
    if case.column is not None:
        return check_both(case, x, amax, case.column)
    quantizer = kernels.make(case.spec)
    codes = quantizer.codes(x, case.key, amax)
    right = reference.quantize(case.x, case.spec, key=case.key, amax=case.amax)
    values = reference.quantize_dequantize(case.x, case.spec, key=case.key, amax=case.amax)
    differences = Differences()
    differences.compare_codes("", codes, right)
    differences.compare_values("", quantizer.values(x, case.key, amax), values)
    differences.compare("decoded", quantizer.decode(codes).values, values.values)
    if isinstance(quantizer, kernels.TritonQuantizer) and quantizer.writes_factors:
        scale = torch.tensor(0.3, device=x.device)
        made = quantizer.values(x, case.key, amax, scale)
        differences.compare_factors("", made, values, scale)
    weight = torch.nn.Parameter(x)
    if takes(weight):
        _, largest = amaxes([weight, weight])
        differences.compare("amax of weights", largest, case.x.abs().amax())
    return differences


def check_both(case: Case, x: Tensor, amax: Tensor | None, column: QuantSpec) -> dict[str, str]:
    """Differences between the codes of both forms that one kernel makes, its scales in tiles where
    there are such, and those of the reference. A kernel to which the amax is given measures that of
    x.
    """
    row = kernels.TritonQuantizer(case.spec).in_tiles
    other = kernels.TritonQuantizer(column).in_tiles
    pair = kernels.pair(row, other, codes=(True, True))
    if pair is None:
        return {"why_not": "no kernel for both forms"}
    newest = None if amax is None else torch.zeros_like(amax)
    keys = (KEY, TURNED)
    forms = pair[0].with_columns(pair[1], x, keys, (amax, amax), (True, True), newest)
    if forms is None:
        return {"why_not": "no kernel for both forms"}
    differences = Differences()
    rows = reference.quantize(case.x, case.spec, key=KEY, amax=case.amax)
    columns = reference.quantize(case.x.T, column, key=TURNED, amax=case.amax)
    differences.compare_codes(" of rows", forms[0], rows)
    differences.compare_codes(" of columns", forms[1], columns)
    if newest is not None:
        differences.compare("amax of x", newest, case.x.abs().amax().float())
    if case.spec.block[1] is not None and (column.hadamard is not None or x.is_cuda):
        differences |= check_values(case, x, amax, column)
    return differences


def check_values(case: Case, x: Tensor, amax: Tensor | None, column: QuantSpec) -> dict[str, str]:
    """Differences of what emulation takes: of x values, and codes of the other form; of dy values
    of both forms.

    A spec that draws random bits is that of dy alone. Others may be those of both, as in MXFP8.
    """
    row = kernels.TritonQuantizer(case.spec)
    other = kernels.TritonQuantizer(column)
    rows = reference.quantize_dequantize(case.x, case.spec, key=KEY, amax=case.amax)
    differences = Differences()
    for codes in (False,) if case.spec.random else (True, False):
        forms = row.with_columns(other, x, (KEY, TURNED), (amax, amax), (False, codes))
        if forms is None:
            return {"why_not": "no kernel for values of both forms"}
        row_form, column_form = forms
        beside = "codes" if codes else "values"
        differences.compare_values(f" of rows beside {beside}", row_form, rows)
        if codes:
            assert isinstance(column_form, Quantized)
            columns = reference.quantize(case.x.T, column, key=TURNED, amax=case.amax)
            differences.compare("codes beside values", column_form.codes, columns.codes)
        else:
            values = reference.quantize_dequantize(case.x.T, column, key=TURNED, amax=case.amax)
            differences.compare_values(" of columns", column_form, values)
            if row.writes_factors and other.writes_factors:
                scales = torch.tensor([0.3, 7.0], device=x.device).unbind()
                made = row.with_columns(
                    other, x, (KEY, TURNED), (amax, amax), (False, False), None, scales
                )
                assert made is not None
                differences.compare_factors(" of rows", made[0], rows, scales[0])
                differences.compare_factors(" of columns", made[1], values, scales[1])
    return differences


LARGE = (1 << 17) + 8
"""Rows, or tokens, of a tensor of more than 2^31 elements."""


def check_large() -> dict[str, Any]:
    """Rows of a large tensor, which are compared with those rows alone: of whole rows, and of
    tokens x features that are quantised along the tokens.
    """
    need = LARGE << 17
    if torch.cuda.mem_get_info()[0] < need:
        return {"left out": f"it needs {need >> 30} GiB of free GPU memory"}
    differences = Differences()
    x = torch.randn(LARGE, 1 << 14, device="cuda", dtype=torch.bfloat16)
    differences |= check_large_rows("nvfp4 stochastic", x)
    differences |= check_large_rows("mxfp8 e4m3", x)
    differences |= check_large_rows("nvfp4 hadamard stochastic", x.view(1 << 14, LARGE).T)
    return {"ok": not differences, "differences": differences}


def check_large_rows(name: str, x: Tensor) -> dict[str, str]:
    """Differences of the first, some middle and the last rows."""
    spec = SPECS[name]
    amax = on_device = None
    if spec.global_scale:
        amax = torch.tensor(30.0)
        on_device = amax.to(x.device)
    codes = kernels.TritonQuantizer(spec).codes(x, KEY, on_device)
    differences = Differences()
    for start in (0, LARGE // 32 * 16, LARGE - 16 - LARGE % 16):
        key = KEY.replace(row_offset=KEY.row_offset + start)
        rows = x[start : start + 16].cpu()
        expected = reference.quantize(rows, spec, key=key, amax=amax)
        differences.compare(
            f"{name}, rows from {start}", codes.codes[start : start + 16], expected.codes
        )
    return differences


def row_of(case: Case, device: str) -> dict[str, Any]:
    differences = check(case, device)
    return {"ok": not differences, "differences": differences}


def numbered_row(choice: str, number: int) -> dict[str, Any]:
    """The row of a case in a process of its own."""
    (case,) = (case for at, case in enumerate(CHOICES[choice](SHAPES)) if at == number)
    return row_of(case, "cuda")


def share_out(results: gpu_results.Results, choice: str, processes: int) -> None:
    """All cases, in processes that compile at once."""
    names = {number: case.name for number, case in enumerate(CHOICES[choice](SHAPES))}
    pending = [number for number, name in names.items() if not results.has(name)]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawned) as pool:
        rows = {pool.submit(numbered_row, choice, number): names[number] for number in pending}
        for row in as_completed(rows):
            results.measure(rows[row], row.result)


def main(words: list[str] | None = None) -> int:
    parser = gpu_results.options(__doc__)
    parser.add_argument("choice", choices=tuple(CHOICES))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(words)
    if options.dry_run:
        gpu_stand_ins.interpret()
    device = "cuda" if torch.cuda.is_available() and not options.dry_run else "cpu"
    if reason := kernels.why_not(QuantSpec(), device):
        print(f"the Triton kernels cannot run here: {reason}. Without a GPU: TRITON_INTERPRET=1")
        return 3
    results = gpu_results.Results(options.out)
    if device == "cuda" and options.processes > 1 and options.choice != "first":
        share_out(results, options.choice, options.processes)
    else:
        chosen = list(CHOICES[options.choice](SHAPES if device == "cuda" else TINY))
        if options.dry_run:
            chosen = chosen[::10]
        for case in chosen:
            results.measure(case.name, partial(row_of, case, device))
    if device == "cuda" and options.choice == "all":
        results.measure("more than 2^31 elements", check_large)
    return results.code


if __name__ == "__main__":
    sys.exit(main())
