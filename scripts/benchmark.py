"""What emulated low precision costs on this machine, beside what a user would take instead.

    python scripts/benchmark.py [PART …] --out benchmarks/NAME

Parts are quantize, linear, step, recipes, families, startup and scaling; all where none is named. Where some are
named, the rows of the others stay in NAME.json.
Every ratio has both of its sides measured in one process, in turn, and is a ratio of medians. Where a process's memory
happens to lie moves ratios by several percent, so each part runs in several fresh processes (`--processes`), and the
table holds the median of theirs, with the range. Writes NAME.json with all figures, NAME.md with the table, NAME.png
with throughput over size beside the copy's. Run it on an idle machine: one busy core makes threaded code many times
slower.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gpu_stand_ins
import torch
from benchmark_report import Report, draw, in_turn, machine_name
from benchmark_steps import bench_large_step, bench_recipes, bench_step, real_vocabulary
from torch import Tensor, nn

import fp4train as f4
from fp4train.nn import Linear
from fp4train.precision import MXFP8, NVFP4, Recipe
from fp4train.precision.layers import Layer
from fp4train.quantize import (
    PairQuantizer,
    QuantSpec,
    RandomKey,
    quantize,
    quantize_dequantize,
    quantizer,
)
from fp4train.run.host import keep_freed_memory

MXFP8_SPEC = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
PARTS = ("quantize", "linear", "step", "recipes", "families", "startup", "scaling")
HYBRID = (
    "model=hybrid_tiny",
    "model.width=768",
    "model.hidden=3072",
    "model.heads=12",
    "model.kv_heads=4",
    "model.pattern=M-M*-",
    "model.scan.heads=24",
    "model.scan.state=128",
    "train.batch_size=2",
    "train.seq_len=1024",
)
"""A hybrid whose layers are as wide as those of llama_125m."""
EXPERTS_SETTLE = (100, 30)
"""Steps of a run of moe_tiny, and then of a loop that goes on with its weights, after which no
expert of any layer is without tokens, and the largest load is 1.3 to 2.5 times an even one in
either.
"""


def bench_quantize(report: Report, device: torch.device, size: int) -> None:
    x = torch.randn(size, size, device=device).bfloat16()
    y = torch.empty_like(x)
    recipe = NVFP4().table()
    rowwise = QuantSpec()
    gradient = recipe["dgrad"].first
    transposed = recipe["wgrad"].first
    assert gradient is not None and transposed is not None
    key = RandomKey(seed=1, step=2, layer=3, operand=2)
    both = PairQuantizer(
        quantizer(gradient, device.type),
        quantizer(transposed, device.type),
        row_codes=False,
        column_codes=False,
    )
    functions: dict[str, Callable[[], object]] = {
        "copy": lambda: y.copy_(x),
        "row": lambda: quantize_dequantize(x, rowwise),
        "codes": lambda: quantize(x, rowwise),
        "both": lambda: both(x, key, None, key, None),
        "mxfp8": lambda: quantize_dequantize(x, MXFP8_SPEC),
        "readable reference": lambda: quantize_dequantize(x, rowwise, kernel="reference"),
        **(torchao_functions(x) if report.seconds else {}),
    }
    times = in_turn(functions, device, seconds=report.seconds)
    copy = times["copy"]
    name = f"{size}² BF16"
    report.add(
        f"copy of {name}, bandwidth (read + written)", 4 * size * size / copy / 1e9, unit="GB/s"
    )
    if "torchao compiled" in times:
        report.add(
            f"NVFP4 1×16 quantise-dequantise, {name}: faster than torchao's compiled",
            times["torchao compiled"] / times["row"],
            15,
            at_least=True,
        )
        report.add("… faster than torchao's eager", times["torchao eager"] / times["row"])
    report.add(f"NVFP4 1×16 quantise-dequantise, {name}, over the copy", times["row"] / copy, 1.6)
    report.add(f"NVFP4 1×16 codes and scales, {name}, over the copy", times["codes"] / copy)
    report.add(
        f"both directions, Hadamard and stochastic rounding, {name}, over the copy",
        times["both"] / copy,
        6,
    )
    report.add(f"MXFP8 quantise-dequantise, {name}, over the copy", times["mxfp8"] / copy)
    report.add(f"the readable reference, {name}, over the copy", times["readable reference"] / copy)


def torchao_functions(x: Tensor) -> dict[str, Callable[[], object]]:
    """torchao's NVFP4 quantise and dequantise, eager and compiled; nothing where torchao is not
    installed.
    """
    try:
        from torchao.prototype.mx_formats.nvfp4_tensor import (
            nvfp4_quantize,
            per_tensor_amax_to_scale,
        )
    except ImportError:
        return {}

    def both(t: Tensor) -> tuple[Tensor, Tensor]:
        scales, codes = nvfp4_quantize(t, 16, per_tensor_amax_to_scale(t.abs().amax().float()))
        return scales, codes

    compiled = torch.compile(both)
    return {"torchao eager": lambda: both(x), "torchao compiled": lambda: compiled(x)}


def bench_scaling(report: Report, device: torch.device) -> None:
    for name, spec in (("NVFP4 1×16", QuantSpec()), ("MXFP8 1×32", MXFP8_SPEC)):
        powers = range(16, 27, 2) if report.seconds else (10, 12)
        times = {power: time_size(power, spec, device, report.seconds / 4) for power in powers}
        report.curves[name] = [(1 << power, t["quantise-dequantise"]) for power, t in times.items()]
        report.curves["copy"] = [(1 << power, t["copy"]) for power, t in times.items()]
        costs = [t["quantise-dequantise"] / (1 << power) for power, t in times.items()]
        report.add(
            f"{name}: largest over smallest cost per element, 2¹⁶ to 2²⁶ elements",
            max(costs) / min(costs),
            1.5,
        )
    costs = [seconds / elements for elements, seconds in report.curves["copy"]]
    report.add("… the copy itself, whose small tensors stay in the cache", max(costs) / min(costs))


def time_size(
    power: int, spec: QuantSpec, device: torch.device, seconds: float
) -> dict[str, float]:
    """Seconds for 2^power elements, quantised and copied."""
    x = torch.randn(1 << (power // 2), 1 << (power - power // 2), device=device).bfloat16()
    y = torch.empty_like(x)
    functions = {
        "quantise-dequantise": lambda: quantize_dequantize(x, spec),
        "copy": lambda: y.copy_(x),
    }
    return in_turn(functions, device, seconds=seconds)


def bench_linear(report: Report, device: torch.device, tokens: int, size: int) -> None:
    """Forward and backward of one square layer."""
    x = torch.randn(tokens, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, size, device=device, dtype=torch.bfloat16)
    plain = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
    layer = Layer(name="linear", in_features=size, out_features=size, block=0, blocks=1)
    ours = Linear.from_linear(nn.Linear(size, size, bias=False, device=device), layer, "emulate")
    nvfp4 = NVFP4()
    mxfp8 = MXFP8()
    step = 0

    def baseline() -> None:
        x.grad = plain.weight.grad = None
        plain(x).backward(dy)

    def quantised(recipe: Recipe) -> None:
        nonlocal step
        step += 1  # each call quantises its weights anew, as the first microbatch of a step does
        x.grad = ours.weight.grad = None
        with f4.autocast(recipe, step=step):
            y = ours(x)
        y.backward(dy)

    functions: dict[str, Callable[[], object]] = {
        "bf16": baseline,
        "nvfp4": lambda: quantised(nvfp4),
        "mxfp8": lambda: quantised(mxfp8),
    }
    times = in_turn(functions, device, seconds=report.seconds)
    shape = f"{tokens} tokens, {size}→{size}"
    target = 1.05 if size >= 2048 else 1.25
    report.add(
        f"NVFP4 linear forward + backward, {shape}, over BF16 nn.Linear",
        times["nvfp4"] / times["bf16"],
        target,
    )
    report.add(
        f"MXFP8 linear forward + backward, {shape}, over BF16 nn.Linear",
        times["mxfp8"] / times["bf16"],
    )


def saved_bytes() -> float:
    """Bytes that one NVFP4 linear keeps for its backward besides its weight, per element of x."""
    layer = f4.convert(nn.Linear(512, 512, bias=False))
    assert isinstance(layer, nn.Linear)
    x = torch.randn(1024, 512, dtype=torch.bfloat16, requires_grad=True)
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != layer.weight.data_ptr():
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), f4.autocast(NVFP4()):
        layer(x)
    return sum(sizes) / x.numel()


def bench_startup(report: Report) -> None:
    """From the command to the first training step of the default run, as a person waits for it."""
    seconds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            command = [sys.executable, "-m", "fp4train", f"run.dir={folder}/run"]
            with subprocess.Popen(
                command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            ) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if line.startswith("step 1/"):
                        seconds.append(time.perf_counter() - began)
                        process.kill()
                        break
    report.add(
        "from the command to the first training step of the default run",
        statistics.median(seconds),
        8,
        unit="s",
    )


def run_parts(
    report: Report, parts: list[str], device: torch.device, *, quick: bool, dry: bool = False
) -> None:
    """Measure in this process. dry: on a CPU also what is for GPUs, with a stand-in for the
    compiler.
    """
    keep_freed_memory()
    if "startup" in parts:
        bench_startup(report)
    if "quantize" in parts:
        bench_quantize(report, device, 256 if quick else 4096)
    if "scaling" in parts:
        bench_scaling(report, device)
    if "linear" in parts:
        for size in [64] if quick else [512, 2048]:
            bench_linear(report, device, 256 if quick else 2048, size)
        report.add(
            "bytes an NVFP4 linear saves for backward, per element of x",
            saved_bytes(),
            0.6,
            unit="B",
        )
    small = ["train.batch_size=2", "train.seq_len=32"] if quick else []
    if "recipes" in parts:
        bench_recipes(report, device, ["backend=emulate", *small], "default run")
    if "families" in parts:
        for name, keys, target, quantised, settling in (
            ("hybrid_tiny", ["model=hybrid_tiny"], 1.1, None, (0, 0)),
            ("moe_tiny", ["model=moe_tiny"], 1.5, 1.5, (2, 2) if quick else EXPERTS_SETTLE),
            *(
                ()
                if quick
                else [("hybrid of width 768, 2048 tokens", [*HYBRID], 1.1, None, (0, 0))]
            ),
        ):
            how = {"bare_target": None, "quantised_target": quantised, "settling": settling}
            bench_step(report, device, ["backend=emulate", *keys, *small], name, target, **how)
    if "step" in parts:
        bench_step(report, device, ["backend=emulate", *small], "default run", 1.15)
        if not quick:
            large = [
                "backend=emulate",
                "model=llama_125m",
                "train.batch_size=2",
                "train.seq_len=1024",
            ]
            bench_step(report, device, large, "llama_125m, 2048 tokens", 1.10)
        if device.type == "cuda":
            larger = ["model=llama_1b", "train.batch_size=8", "train.seq_len=2048"]
            with real_vocabulary(seq_len=2048) as data:
                bench_large_step(report, device, [*larger, *data], "llama_1b, 16384 tokens")
        elif dry:
            with real_vocabulary(seq_len=32, ids=257) as data, gpu_stand_ins.compiler():
                bench_large_step(report, device, [*small, *data], "default run, 64 tokens")


def run_processes(report: Report, parts: list[str], processes: int, options: list[str]) -> None:
    """Measure each part in `processes` fresh ones; a row is the median of theirs."""
    for part in parts:
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for i in range(processes):
                print(f"{part}: process {i + 1} of {processes}", file=sys.stderr, flush=True)
                out = Path(folder) / "part"
                command = [
                    sys.executable,
                    __file__,
                    part,
                    "--processes",
                    "1",
                    "--out",
                    str(out),
                    *options,
                ]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found.append(json.loads(out.with_suffix(".json").read_text()))
        for rows in zip(*(each["rows"] for each in found), strict=True):
            values = [row["value"] for row in rows]
            report.add(
                rows[0]["what"],
                values,
                rows[0]["target"],
                at_least=rows[0]["at_least"],
                unit=rows[0]["unit"],
            )
        for name in found[0]["curves"]:
            points = zip(*(each["curves"][name] for each in found), strict=True)
            report.curves[name] = [
                (same[0][0], statistics.median(seconds for _, seconds in same)) for same in points
            ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="path without ending")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes for each part")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument(
        "--dry-run", action="store_true", help="smallest sizes on a CPU; the figures mean nothing"
    )
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    parts = args.parts or list(PARTS)
    device = torch.device(args.device)
    report = Report(out=args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.dry_run:
        device = torch.device("cpu")
        report.seconds = 0.0
    name = machine_name(device)
    machine = {"machine": name, "torch": torch.__version__, "python": platform.python_version()}
    try:
        if args.parts:
            report.go_on(machine)
    except ValueError as error:
        parser.error(str(error))
    if args.processes == 1 or args.dry_run:
        run_parts(report, parts, device, quick=args.quick or args.dry_run, dry=args.dry_run)
    else:
        options = ["--device", args.device, *(["--quick"] if args.quick else [])]
        run_processes(report, parts, args.processes, options)
    report.write(machine)
    args.out.with_suffix(".md").write_text(report.markdown(name))
    if report.curves and "scaling" in parts:
        draw(report, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
