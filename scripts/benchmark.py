"""What emulated low precision costs on this machine, beside what a user would take instead.

    python scripts/benchmark.py [PART …] --out benchmarks/NAME

Parts are quantize, linear, step, recipes, families, checkpoint and startup; all where none is named. Where some are
named, the rows of the others stay in NAME.json.
Every ratio has both of its sides measured in one process, in turn, and is a ratio of medians. Where a process's memory
happens to lie moves ratios by several percent, so each part runs in several fresh processes (`--processes`), and the
table holds the median of theirs, with the range. Writes NAME.json with all figures and NAME.md with the table. Run it
on an idle machine: one busy core makes threaded code many times slower. `gpu_check.sh … profile` measures large models
on a GPU.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmark_report import Report, in_turn, machine_name
from benchmark_steps import bench_checkpoint, bench_recipes, bench_step
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
PARTS = ("quantize", "linear", "step", "recipes", "families", "checkpoint", "startup")
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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what is measured.

    Args:
        square: rows and columns of the quantised tensor.
        tokens, features: rows of x, and columns of x and y, of the linear layers.
        keys: keys of the training runs.
        saved, saved_on_gpu: models whose checkpoints are written.
    """

    square: int
    tokens: int
    features: tuple[int, ...]
    keys: tuple[str, ...] = ()
    saved: str
    saved_on_gpu: str


FULL = Sizes(
    square=4096,
    tokens=2048,
    features=(512, 2048),
    saved="llama_125m",
    saved_on_gpu="llama_1b",
)
QUICK = Sizes(
    square=256,
    tokens=256,
    features=(64,),
    keys=("train.batch_size=2", "train.seq_len=32"),
    saved="llama_tiny",
    saved_on_gpu="llama_tiny",
)


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
    }
    if report.seconds:
        functions |= torchao_functions(x)
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


def bench_families(report: Report, device: torch.device, small: list[str], *, quick: bool) -> None:
    """A training step of models that are no Llama, over one of the same model in a bare loop."""
    how: dict[str, Any] = {"target": 1.1, "bare_target": None}
    keys = ["backend=emulate", *small]
    bench_step(report, device, [*keys, "model=hybrid_tiny"], "hybrid_tiny", **how)
    if not quick:
        name = "hybrid of width 768, 2048 tokens"
        bench_step(report, device, [*keys, *HYBRID], name, **how)
    how |= {"target": 1.5, "quantised_target": 1.5, "settling": EXPERTS_SETTLE}
    if quick:
        how["settling"] = (2, 2)
    bench_step(report, device, [*keys, "model=moe_tiny"], "moe_tiny", **how)


def run_parts(report: Report, parts: list[str], device: torch.device, *, quick: bool) -> None:
    """Measure in this process."""
    keep_freed_memory()
    sizes = QUICK if quick else FULL
    small = [*sizes.keys]
    if "startup" in parts:
        bench_startup(report)
    if "quantize" in parts:
        bench_quantize(report, device, sizes.square)
    if "linear" in parts:
        for features in sizes.features:
            bench_linear(report, device, sizes.tokens, features)
        what = "bytes an NVFP4 linear saves for backward, per element of x"
        report.add(what, saved_bytes(), 0.6, unit="B")
    if "recipes" in parts:
        bench_recipes(report, device, ["backend=emulate", *small], "default run")
    if "families" in parts:
        bench_families(report, device, small, quick=quick)
    if "step" in parts:
        keys = ["backend=emulate", *small]
        bench_step(report, device, keys, "default run", 1.15)
        if not quick:
            keys += ["model=llama_125m", "train.batch_size=2", "train.seq_len=1024"]
            bench_step(report, device, keys, "llama_125m, 2048 tokens", 1.10)
    if "checkpoint" in parts:
        model = sizes.saved_on_gpu if device.type == "cuda" else sizes.saved
        bench_checkpoint(report, device, [f"model={model}"], model)


def run_processes(report: Report, parts: list[str], processes: int, options: list[str]) -> None:
    """Measure each part in `processes` fresh ones; a row is the median of theirs."""
    for part in parts:
        results = []
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
                results.append(json.loads(out.with_suffix(".json").read_text()))
        for rows in zip(*(result["rows"] for result in results), strict=True):
            values = [row["value"] for row in rows]
            report.add(
                rows[0]["what"],
                values,
                rows[0]["target"],
                at_least=rows[0]["at_least"],
                unit=rows[0]["unit"],
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="path without ending")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes for each part")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    parts = args.parts or list(PARTS)
    device = torch.device(args.device)
    report = Report(out=args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    name = machine_name(device)
    machine = {"machine": name, "torch": torch.__version__, "python": platform.python_version()}
    try:
        if args.parts:
            report.go_on(machine)
    except ValueError as error:
        parser.error(str(error))
    if args.processes == 1:
        if args.quick:
            report.seconds = 0.0
        run_parts(report, parts, device, quick=args.quick)
    else:
        options = ["--device", args.device, *["--quick"] * args.quick]
        run_processes(report, parts, args.processes, options)
    report.write(machine)
    args.out.with_suffix(".md").write_text(report.markdown(name))


if __name__ == "__main__":
    main()
