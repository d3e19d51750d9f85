"""Check the Triton kernels on this machine's GPU, in one command; `gpu_bandwidth.py` times them:

    python scripts/gpu_kernels.py --out benchmarks/gpu_kernels.json [--launched | --pieces]

Every kernel runs against the readable reference, computed on the CPU: codes, scales, amax, values and decoded values,
over specs, shapes, dtypes, strides and bad input; one tensor of more than 2^31 elements, some rows of it (left out by
--no-large or too little memory). Any difference ends the run with status 1. `--launched` checks what training runs
launch alone (`gpu_launched.py`), `--pieces` what recipes of research add.

Compiling takes most of the time: Triton's ptxas needs 4 to 20 s for some kernels. So the cases are shared out among as
many processes as there are cores, which compile into one cache folder (TRITON_CACHE_DIR) and write each case to
OUT.cases.jsonl as it is done; called again, the script goes on with the others. `--full` adds shapes and FP16.

`--sanitize` runs few small cases. Called once by itself it compiles them in all processes, so that

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python scripts/gpu_kernels.py --sanitize --processes 1
    compute-sanitizer --tool racecheck python scripts/gpu_kernels.py --sanitize --processes 1

find them in the cache. On a machine without a GPU `TRITON_INTERPRET=1 python scripts/gpu_kernels.py` checks exactness
alone, in Triton's interpreter, and `--dry-run` some of it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_stand_ins
import torch
from gpu_cases import IN_STEPS, KEY, PIECES, SPECS, Case, cases, one_form
from gpu_launched import launched_cases
from torch import Tensor

from fp4train.quantize import (
    Decoded,
    Quantized,
    QuantSpec,
    RandomKey,
    reference,
    triton as kernels,
)

TINY = ((20, 40),)
"""The shape of a dry run."""


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
        else pair[0].with_columns(pair[1], x, KEY, amax, turned, amax, True, True, newest)
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
        forms = row.with_columns(other, x, KEY, amax, turned, amax, False, codes)
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


def check_large() -> str | None:
    """More than 2^31 elements: rows of the whole against those rows alone. None if equal, else a
    difference.
    """
    rows = (1 << 17) + 8
    cols = 1 << 14
    need = rows * cols * 8
    if torch.cuda.mem_get_info()[0] < need:
        return f"left out: needs {need >> 30} GiB of free GPU memory"
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    for name in ("nvfp4", "nvfp4 stochastic", "nvfp4 16x16", "mxfp8 e4m3"):
        spec = SPECS[name]
        key = KEY if spec.rounding == "stochastic" else None
        amax = torch.tensor(5.0) if spec.global_scale else None
        device_amax = None if amax is None else amax.cuda()
        whole = kernels.TritonQuantizer(spec).codes(x, key, device_amax)
        for start in (0, rows // 2, rows - 16):
            start -= start % 16
            part = x[start : start + 16].cpu()
            part_key = key.replace(row_offset=key.row_offset + start) if key else None
            wanted = reference.quantize(part, spec, key=part_key, amax=amax)
            if text := difference(whole.codes[start : start + part.shape[0]], wanted.codes):
                return f"{name}, rows from {start}: {text}"
    # Tokens x features, quantised along the tokens.
    wide = torch.randn(1 << 14, rows, device="cuda", dtype=torch.bfloat16)
    wide_amax = torch.tensor(30.0)
    spec = SPECS["nvfp4 hadamard stochastic"]
    whole = kernels.TritonQuantizer(spec).codes(wide.T, KEY, wide_amax.cuda())
    start = rows - 16
    part_key = KEY.replace(row_offset=KEY.row_offset + start)
    wanted = reference.quantize(wide[:, start:].T.cpu(), spec, key=part_key, amax=wide_amax)
    return difference(whole.codes[start:], wanted.codes)


def machine() -> dict[str, str]:
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = f"{properties.major}.{properties.minor}"
        found |= {"gpu": properties.name, "capability": capability, "cuda": str(torch.version.cuda)}
    else:
        found["gpu"] = "none: Triton's interpreter on the CPU"
    return found


def all_cases(device: str, *, sanitize: bool, full: bool, pieces: bool = False) -> list[Case]:
    """What is checked. pieces: what recipes of research add."""
    kinds = ["wide", "normal", "nan", "grid", "inf", "huge", "tiny"]
    dtypes = [torch.bfloat16, torch.float32]
    if sanitize or device == "cpu":
        shapes = [(20, 40)]
        full = True
    else:
        shapes = [(33, 70), (256, 512)]
    if full:
        dtypes.append(torch.float16)
        if len(shapes) > 1:
            shapes = [(1, 1), (20, 40), *shapes, (129, 4100), (1000, 1536)]
    if pieces:
        return list(one_form({**PIECES, **IN_STEPS}, shapes, kinds, dtypes))
    return list(cases(shapes=shapes, kinds=kinds, dtypes=dtypes))


def exactness(chosen: list[Case], device: str, written: Path | None) -> list[dict[str, Any]]:
    """One record per case: its name and its differences; each is appended to `written` as it is
    known.
    """
    records = []
    for case in chosen:
        try:
            found = check(case, device)
        # of the compiler or the launch: the other cases still tell something
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"}
        records.append({"case": case.name, "differences": found})
        if found:
            print("DIFFERENT", case.name, found, flush=True)
        if written is not None:
            # one write of less than a page: processes do not mix their lines
            with written.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    return records


def read_records(path: Path | None, names: set[str]) -> dict[str, dict[str, Any]]:
    """What was written before of the cases of these names, by name; a line that was cut off does
    not count.
    """
    if path is None or not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["case"] in names:
            found[record["case"]] = record
    return found


def in_processes(count: int, written: Path | None, options: list[str]) -> None:
    """Run the cases that `written` does not hold in `count` processes of this script; without it
    they only fill the cache of compiled kernels.
    """
    command = [sys.executable, __file__, *(["--out", str(written)] if written else []), *options]
    children = [
        subprocess.Popen([*command, "--share", f"{index}/{count}"]) for index in range(count)
    ]
    for child in children:
        child.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--launched", action="store_true", help="what training runs launch (gpu_launched.py)"
    )
    parser.add_argument(
        "--pieces", action="store_true", help="what recipes of research add, and nothing else"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="few small cases: for compute-sanitizer"
    )
    parser.add_argument("--full", action="store_true", help="more shapes, and FP16")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="that compile and check at once"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="one case in twenty, in Triton's interpreter on a CPU",
    )
    parser.add_argument(
        "--no-large", action="store_true", help="leave the tensor of more than 2^31 elements out"
    )
    arguments = parser.parse_args()
    if arguments.dry_run:
        gpu_stand_ins.interpret()
    device = "cuda" if torch.cuda.is_available() and not arguments.dry_run else "cpu"
    if reason := kernels.why_not(QuantSpec(), device):
        print(
            f"cannot run the Triton kernels here: {reason}. Without a GPU set TRITON_INTERPRET=1",
            file=sys.stderr,
        )
        return 3
    if arguments.launched:
        chosen = launched_cases(TINY) if arguments.dry_run else launched_cases()
    else:
        chosen = all_cases(
            device, sanitize=arguments.sanitize, full=arguments.full, pieces=arguments.pieces
        )
    if arguments.dry_run:
        chosen = chosen[:: 5 if arguments.launched else 20]
    if arguments.share:  # `out` is the file that all of them write to
        index, count = map(int, arguments.share.split("/"))
        done = read_records(arguments.out, {case.name for case in chosen})
        exactness(
            [case for case in chosen[index::count] if case.name not in done], device, arguments.out
        )
        return 0
    found = machine()
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    written = None
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        written = arguments.out.with_suffix(".cases.jsonl")
    names = {case.name for case in chosen}
    if device == "cuda" and arguments.processes > 1:
        options = [
            f"--{name}"
            for name in ("full", "sanitize", "launched", "pieces")
            if getattr(arguments, name)
        ]
        in_processes(arguments.processes, written, options)
    done = read_records(written, names)
    for record in exactness([case for case in chosen if case.name not in done], device, written):
        done[record["case"]] = record
    records = [done[case.name] for case in chosen]
    wrong = [record for record in records if record["differences"]]
    print(f"exactness: {len(records) - len(wrong)} of {len(records)} cases equal the reference")
    result: dict[str, Any] = {"machine": found, "cases": len(records), "different": wrong}
    result["names"] = [record["case"] for record in records]
    whole = not arguments.sanitize and not arguments.pieces
    if device == "cuda" and whole and not arguments.no_large:
        large = check_large()
        result["more_than_2^31_elements"] = large or "equal"
        print(f"more than 2^31 elements: {large or 'equal'}")
        if large and not large.startswith("left out"):
            wrong.append({"case": "more than 2^31 elements", "differences": {"codes": large}})
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
