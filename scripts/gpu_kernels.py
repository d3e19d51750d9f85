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
    RandomKey,
    reference,
    triton as kernels,
)

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
    return (
        x
        if device == "cpu"
        else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    )


def difference(ours: Tensor | None, theirs: Tensor | None) -> str | None:
    """How two results differ in dtype, shape or bits (all NaN are equal); None if they do not."""
    if ours is None or theirs is None:
        return None if ours is theirs else "one is missing"
    ours = ours.cpu()
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    equal = ours.contiguous().view(integer) == theirs.contiguous().view(integer)
    if ours.dtype.is_floating_point:
        equal |= ours.isnan() & theirs.isnan()
    if bool(equal.all()):
        return None
    where = (~equal).nonzero()[0].tolist()
    mine = ours[tuple(where)]
    right = theirs[tuple(where)]
    return f"{int((~equal).sum())} of {equal.numel()} differ, first at {where}: {mine}, not {right}"


def check(case: Case, device: str) -> dict[str, str]:
    """Differences between the kernels and the reference, by what differs; empty if there are
    none.
    """
    x = on(case.x, device)
    amax = None if case.amax is None else case.amax.to(device)
    if reason := kernels.why_not(case.spec, x.device.type) or kernels.why_not_tensor(x):
        return {"why_not": reason}
    if case.column is not None:
        return check_both(case, x, amax, case.column)
    quantizer = kernels.make(case.spec)
    quantized = quantizer.codes(x, case.key, amax)
    decoded = quantizer.values(x, case.key, amax)
    wanted = reference.quantize(case.x, case.spec, key=case.key, amax=case.amax)
    wanted_decoded = reference.quantize_dequantize(case.x, case.spec, key=case.key, amax=case.amax)
    pairs = {
        "codes": (quantized.codes, wanted.codes),
        "scales": (quantized.scales, wanted.scales),
        "amax": (quantized.amax, wanted.amax),
        "S_dec": (quantized.global_decode(), wanted.global_decode()),
        "values": (decoded.values, wanted_decoded.values),
        "scale": (decoded.scale, wanted_decoded.scale),
    }
    pairs["decoded"] = (quantizer.decode(quantized).values, wanted_decoded.values)
    found = {what: difference(*pair) for what, pair in pairs.items()}
    return {what: text for what, text in found.items() if text is not None}


def check_both(case: Case, x: Tensor, amax: Tensor | None, column: QuantSpec) -> dict[str, str]:
    """Differences between the codes of both forms that one kernel makes, its scales in tiles where
    there are such, and those of the reference. A kernel to which the amax is given measures that of
    x.
    """
    row, other = (kernels.TritonQuantizer(spec).in_tiles for spec in (case.spec, column))
    pair = kernels.pair(row, other, codes=(True, True))
    turned = KEY.replace(operand=4, row_offset=16, col_offset=8)
    newest = None if amax is None else torch.zeros_like(amax)
    made = (
        None
        if pair is None
        else pair[0].with_columns(pair[1], x, (KEY, turned), (amax, amax), (True, True), newest)
    )
    if made is None:
        return {"why_not": "no kernel for both forms"}
    specs = ((case.x, case.spec, KEY), (case.x.T, column, turned))
    given = case.amax
    wanted = [reference.quantize(each, spec, key=key, amax=given) for each, spec, key in specs]
    found = differences(made, wanted)
    if case.spec.block[1] is not None and (column.hadamard is not None or x.is_cuda):
        found |= check_values(case, x, amax, column, turned)
    if (
        newest is not None
        and (unlike := difference(newest, case.x.abs().amax().float())) is not None
    ):
        found["amax of x"] = unlike
    return found


def check_values(
    case: Case, x: Tensor, amax: Tensor | None, column: QuantSpec, turned: RandomKey
) -> dict[str, str]:
    """Differences of what emulation takes: of x values, and codes of the other form; of dy values
    of both forms.

    A spec that draws random bits is that of dy alone. Others may be those of both, as in MXFP8."""
    row, other = (kernels.TritonQuantizer(spec) for spec in (case.spec, column))
    found: dict[str, str | None] = {}
    rows = reference.quantize_dequantize(case.x, case.spec, key=KEY, amax=case.amax)
    for codes in (False,) if case.spec.random else (True, False):
        forms = row.with_columns(other, x, (KEY, turned), (amax, amax), (False, codes))
        if forms is None:
            return {"why_not": "no kernel for values of both forms"}
        row_form, column_form = forms
        assert isinstance(row_form, Decoded)
        kind = "codes" if codes else "values"
        found[f"values of rows beside {kind}"] = difference(row_form.values, rows.values)
        found[f"scale of rows beside {kind}"] = difference(row_form.scale, rows.scale)
        if isinstance(column_form, Quantized):
            quantized = reference.quantize(case.x.T, column, key=turned, amax=case.amax)
            found["codes beside values"] = difference(column_form.codes, quantized.codes)
        else:
            columns = reference.quantize_dequantize(case.x.T, column, key=turned, amax=case.amax)
            found["values of columns"] = difference(column_form.values, columns.values)
            found["scale of columns"] = difference(column_form.scale, columns.scale)
        assert isinstance(column_form, Quantized) is codes
    return {what: text for what, text in found.items() if text is not None}


def differences(made: Iterable[object], wanted: Iterable[Quantized]) -> dict[str, str]:
    """How codes of both forms, and what belongs to them, differ."""
    found: dict[str, str | None] = {}
    for form, ours, theirs in zip(("rows", "columns"), made, wanted, strict=True):
        assert isinstance(ours, Quantized)
        found[f"codes of {form}"] = difference(ours.codes.view(torch.uint8), theirs.codes)
        found[f"scales of {form}"] = difference(ours.block_scales(), theirs.block_scales())
        found[f"amax of {form}"] = difference(ours.amax, theirs.amax)
        found[f"S_dec of {form}"] = difference(ours.global_decode(), theirs.global_decode())
    return {what: text for what, text in found.items() if text is not None}


def check_large() -> dict[str, Any]:
    """More than 2^31 elements, rows of which are compared with those rows alone: of whole rows, and of
    tokens x features that are quantised along the tokens.
    """
    rows = (1 << 17) + 8
    need = rows * (1 << 17)
    if torch.cuda.mem_get_info()[0] < need:
        return {"left out": f"it needs {need >> 30} GiB of free GPU memory"}
    amax = torch.tensor(30.0)
    shapes = {
        "nvfp4 stochastic": (rows, 1 << 14),
        "mxfp8 e4m3": (rows, 1 << 14),
        "nvfp4 hadamard stochastic": (1 << 14, rows),
    }
    for name, shape in shapes.items():
        spec = SPECS[name]
        x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        x = x if shape[0] == rows else x.T
        given = amax if spec.global_scale else None
        whole = kernels.TritonQuantizer(spec).codes(
            x, KEY, None if given is None else given.to(x.device)
        )
        for start in (0, rows // 32 * 16, rows - 16 - rows % 16):
            part = x[start : start + 16]
            key = KEY.replace(row_offset=KEY.row_offset + start)
            expected = reference.quantize(part.cpu(), spec, key=key, amax=given)
            if text := difference(whole.codes[start : start + 16], expected.codes):
                return {"ok": False, "differences": {f"{name}, rows from {start}": text}}
    return {}


def row_of(case: Case, device: str) -> dict[str, Any]:
    found = check(case, device)
    return {"ok": not found, "differences": found}


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
    given = parser.parse_args(words)
    if given.dry_run:
        gpu_stand_ins.interpret()
    device = "cuda" if torch.cuda.is_available() and not given.dry_run else "cpu"
    if reason := kernels.why_not(QuantSpec(), device):
        print(f"the Triton kernels cannot run here: {reason}. Without a GPU: TRITON_INTERPRET=1")
        return 3
    results = gpu_results.Results(given.out)
    if device == "cuda" and given.processes > 1 and given.choice != "first":
        share_out(results, given.choice, given.processes)
    else:
        found = list(CHOICES[given.choice](SHAPES if device == "cuda" else TINY))
        for case in found[:: 10 if given.dry_run else 1]:
            results.measure(case.name, partial(row_of, case, device))
    if device == "cuda" and given.choice == "all":
        results.measure("more than 2^31 elements", check_large)
    return results.code


if __name__ == "__main__":
    sys.exit(main())
