"""What emulated low precision costs on this machine, beside what a user would take instead.

    python scripts/benchmark.py [quantize] [linear] [step] [recipes] [startup] [scaling] --out benchmarks/NAME

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

import fp4train as f4
from fp4train.config import RECIPES
from fp4train.config.composition import compose
from fp4train.config.schema import to_config
from fp4train.nn import Linear
from fp4train.precision import BF16, MXFP8, NVFP4, FP8Current, Recipe, Timeline
from fp4train.precision.layers import Layer
from fp4train.precision.plan import Plan
from fp4train.quantize import PairQuantizer, QuantSpec, RandomKey, quantize, quantize_dequantize, quantizer
from fp4train.run.begin import RunStart
from fp4train.run.build import build, build_plan
from fp4train.run.host import CollectorBetweenSteps, keep_freed_memory
from fp4train.run.run import Run
from fp4train.train import train_step

MXFP8_SPEC = QuantSpec(element="e4m3", block=(1, 32), scale="e8m0", global_scale=None)
VOCABULARY = 128_256
"""Of Llama 3 (arXiv:2407.21783, table 3)."""
PARTS = ("quantize", "linear", "step", "recipes", "startup", "scaling")


@dataclass
class Report:
    """Rows of the table: what, measured, target (None: information only)."""

    seconds: float = 2.0
    """That each function is measured for, at least; five times in any case."""
    out: Path | None = None
    """Written anew after each row: what ends the process early leaves those before."""
    rows: list[dict[str, object]] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(
        self,
        what: str,
        values: float | list[float],
        target: float | None = None,
        *,
        at_least: bool = False,
        unit: str = "×",
    ) -> None:
        """A row: one figure, or those of several processes, of which the median counts."""
        values = values if isinstance(values, list) else [values]
        value = statistics.median(values)
        met = None if target is None else (value >= target if at_least else value <= target)
        self.rows.append(
            {
                "what": what,
                "value": value,
                "values": values,
                "unit": unit,
                "target": target,
                "at_least": at_least,
                "met": met,
            }
        )
        goal = (
            "" if target is None else f"   target {'≥' if at_least else '≤'} {target:g}   {'met' if met else 'MISSED'}"
        )
        print(f"{what:<84} {value:8.3f} {unit}{goal}", flush=True)
        self.write({})

    def write(self, machine: dict[str, str]) -> None:
        if self.out is not None:
            text = json.dumps({**machine, "rows": self.rows, "curves": self.curves}, indent=1)
            self.out.with_suffix(".json").write_text(text + "\n")

    def markdown(self, machine: str) -> str:
        lines = [f"# Benchmarks: {machine}", "", "| what | median | range | target | |", "|---|---|---|---|---|"]
        for row in self.rows:
            goal = "" if row["target"] is None else f"{'≥' if row['at_least'] else '≤'} {row['target']:g}"
            state = {None: "", True: "met", False: "missed"}[row["met"]]  # type: ignore[index]
            low, high = min(row["values"]), max(row["values"])  # type: ignore[call-overload]
            span = "" if low == high else f"{low:.3f} – {high:.3f}"
            lines.append(f"| {row['what']} | {row['value']:.3f} {row['unit']} | {span} | {goal} | {state} |")
        return "\n".join(lines) + "\n"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def in_turn(functions: dict[str, Callable[[], object]], device: torch.device, *, seconds: float) -> dict[str, float]:
    """Median seconds of each function; they take turns, so that a drift of the machine's speed hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
        function()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds * len(functions) or len(times[next(iter(times))]) < 5:
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def bench_quantize(report: Report, device: torch.device, size: int) -> None:
    x = torch.randn(size, size, device=device).bfloat16()
    y = torch.empty_like(x)
    recipe = NVFP4().table()
    rowwise, gradient, transposed = QuantSpec(), recipe["dgrad"].first, recipe["wgrad"].first
    assert gradient is not None and transposed is not None
    key = RandomKey(seed=1, step=2, layer=3, operand=2)
    both = PairQuantizer(
        quantizer(gradient, device.type), quantizer(transposed, device.type), row_codes=False, column_codes=False
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
    report.add(f"copy of {name}, bandwidth (read + written)", 4 * size * size / copy / 1e9, unit="GB/s")
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
    report.add(f"both directions, Hadamard and stochastic rounding, {name}, over the copy", times["both"] / copy, 6)
    report.add(f"MXFP8 quantise-dequantise, {name}, over the copy", times["mxfp8"] / copy)
    report.add(f"the readable reference, {name}, over the copy", times["readable reference"] / copy)


def torchao_functions(x: Tensor) -> dict[str, Callable[[], object]]:
    """torchao's NVFP4 quantise and dequantise, eager and compiled; nothing where torchao is not installed."""
    try:
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
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
        report.add(f"{name}: largest over smallest cost per element, 2¹⁶ to 2²⁶ elements", max(costs) / min(costs), 1.5)
    costs = [seconds / elements for elements, seconds in report.curves["copy"]]
    report.add("… the copy itself, whose small tensors stay in the cache", max(costs) / min(costs))


def time_size(power: int, spec: QuantSpec, device: torch.device, seconds: float) -> dict[str, float]:
    """Seconds for 2^power elements, quantised and copied."""
    x = torch.randn(1 << (power // 2), 1 << (power - power // 2), device=device).bfloat16()
    y = torch.empty_like(x)
    functions = {"quantise-dequantise": lambda: quantize_dequantize(x, spec), "copy": lambda: y.copy_(x)}
    return in_turn(functions, device, seconds=seconds)


def bench_linear(report: Report, device: torch.device, tokens: int, size: int) -> None:
    """Forward and backward of one square layer."""
    x = torch.randn(tokens, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(tokens, size, device=device, dtype=torch.bfloat16)
    plain = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16)
    layer = Layer(name="linear", in_features=size, out_features=size, block=0, blocks=1)
    ours = Linear.from_linear(nn.Linear(size, size, bias=False, device=device), layer, "emulate")
    nvfp4, mxfp8 = NVFP4(), MXFP8()
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
    report.add(f"NVFP4 linear forward + backward, {shape}, over BF16 nn.Linear", times["nvfp4"] / times["bf16"], target)
    report.add(f"MXFP8 linear forward + backward, {shape}, over BF16 nn.Linear", times["mxfp8"] / times["bf16"])


def saved_bytes() -> float:
    """Bytes that one NVFP4 linear keeps for its backward besides its weight, per element of x."""
    layer = f4.convert(nn.Linear(512, 512, bias=False))
    x = torch.randn(1024, 512, dtype=torch.bfloat16, requires_grad=True)
    sizes: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != layer.weight.data_ptr():
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), f4.autocast(NVFP4()):
        layer(x)
    return sum(sizes) / x.numel()


@contextmanager
def built_run(device: torch.device, overrides: list[str]) -> Iterator[tuple[Run, Callable[[Recipe], None]]]:
    """A run ready to train, in a directory that is removed afterwards, and one step of it as `fp4train` makes it."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = compose([*overrides, "run.name=benchmark", f"run.dir={folder}", f"device={device.type}", "track=jsonl"])
        assert isinstance(cfg, DictConfig)
        run = build(RunStart(config=to_config(cfg), cfg=cfg))
        plans: dict[Recipe, Plan] = {}
        with CollectorBetweenSteps() as collector:

            def step(recipe: Recipe) -> None:
                if recipe not in plans:
                    timeline = Timeline(recipe=recipe, steps=run.config.train.steps)
                    plans[recipe] = build_plan(run.config, run.layers, timeline, run.plan.device)
                if (plan := plans[recipe]) is not run.plan:
                    run.plan = plan
                    run.apply(plan.stretches[0])
                done = train_step(run, plan.stretches[0].recipe)
                loss, norm = done.read()
                run.step += 1
                run.tracker.log(run.step, {"train/loss": loss, "train/grad_norm": norm} | done.values)
                collector.after(run.step)

            try:
                yield run, step
            finally:
                run.feed.close()
                run.tracker.finish()


def bench_step(report: Report, device: torch.device, overrides: list[str], name: str, target: float) -> None:
    """A training step as `fp4train` makes it, in BF16, NVFP4 and MXFP8, and the same model in a bare PyTorch loop."""
    bf16, nvfp4, mxfp8 = BF16(), NVFP4(), MXFP8()
    with built_run(device, overrides) as (run, step):
        config = run.config
        torch.manual_seed(0)
        model = config.model.build(vocab_size=257, seq_len=config.train.seq_len).to(device)
        optimizer = config.optim.build(model)
        batches = [run.train_data.batch(i) for i in range(8)]
        steps = 0

        def bare() -> None:
            nonlocal steps
            inputs, targets = (t.to(device) for t in batches[steps % len(batches)])
            # The first context says that activations are BF16; the layers are torch's own, cast by torch's autocast.
            with f4.autocast(BF16()), torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            steps += 1

        functions: dict[str, Callable[[], object]] = {
            "bf16": lambda: step(bf16),
            "nvfp4": lambda: step(nvfp4),
            "mxfp8": lambda: step(mxfp8),
            "bare": bare,
        }
        times = in_turn(functions, device, seconds=3 * report.seconds)
    report.add(f"{name}: a BF16 step", times["bf16"], unit="s")
    report.add(f"{name}: an NVFP4 step over a BF16 step", times["nvfp4"] / times["bf16"], target)
    report.add(f"{name}: an MXFP8 step over a BF16 step", times["mxfp8"] / times["bf16"])
    report.add(f"{name}: a BF16 step over the same model in a bare PyTorch loop", times["bf16"] / times["bare"], 1.02)


def bench_recipes(report: Report, device: torch.device, overrides: list[str], name: str) -> None:
    """A training step in each file of `recipes/`, over one in NVFP4."""
    recipes: dict[str, Recipe] = {}
    for path in sorted(RECIPES.glob("*.yaml")):
        cfg = compose([f"recipe={path.stem}"])
        assert isinstance(cfg, DictConfig)
        recipes[path.stem] = to_config(cfg).recipe
    with built_run(device, overrides) as (_, step):
        functions = {file: partial(step, recipe) for file, recipe in recipes.items()}
        times = in_turn(functions, device, seconds=report.seconds)
    for file, seconds in times.items():
        target = None if file in ("nvfp4", "bf16", "fp16", "fp32") else 1.6
        report.add(f"{name}: a step in recipe={file} over one in nvfp4", seconds / times["nvfp4"], target)


@contextmanager
def real_vocabulary(*, seq_len: int) -> Iterator[list[str]]:
    """Keys of a configuration: random ids of a vocabulary of `VOCABULARY`, enough for a batch; the head of a model is a
    quarter of its step then, and next to nothing with the 257 ids of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.bin"
        ids = torch.randint(VOCABULARY, (64 * (seq_len + 1),), generator=torch.Generator().manual_seed(0))
        path.write_bytes(ids.int().numpy().tobytes())
        yield ["data=tokens", f"data.path={path}", f"data.vocab_size={VOCABULARY}", "data.dtype=int32", "data.val=0.2"]


def bench_large_step(report: Report, device: torch.device, overrides: list[str], name: str) -> None:
    """A model of a size that GPUs are bought for: utilisation, emulated NVFP4 and native FP8, eager and compiled."""
    for compiled in (False, True):
        how = f"{name}, {'compiled' if compiled else 'eager'}"
        settings = [*overrides, f"train.compile={str(compiled).lower()}"]
        with built_run(device, [*settings, "backend=emulate"]) as (run, step):
            recipes: dict[str, Recipe] = {"bf16": BF16(), "nvfp4": NVFP4(), "mxfp8": MXFP8()}
            times = in_turn({k: partial(step, r) for k, r in recipes.items()}, device, seconds=3 * report.seconds)
            peak, tokens = run.peak_tokens_per_s(), run.config.train.tokens
        report.add(f"{how}: a BF16 step", times["bf16"], unit="s")
        if peak is not None:
            report.add(f"{how}: BF16 MFU", tokens / times["bf16"] / peak, 0.45, at_least=True, unit="")
        report.add(f"{how}: an NVFP4 step over a BF16 step", times["nvfp4"] / times["bf16"], 1.35)
        report.add(f"{how}: an MXFP8 step over a BF16 step", times["mxfp8"] / times["bf16"])
        with built_run(device, [*settings, "backend=auto"]) as (run, step):
            recipes = {"bf16": BF16(), "fp8": FP8Current()}
            times = in_turn({k: partial(step, r) for k, r in recipes.items()}, device, seconds=3 * report.seconds)
        report.add(f"{how}: a native FP8 step over a BF16 step", times["fp8"] / times["bf16"], 1.0)


def bench_startup(report: Report) -> None:
    """From the command to the first training step of the default run, as a person waits for it."""
    seconds = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            command = [sys.executable, "-m", "fp4train", f"run.dir={folder}/run"]
            with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if line.startswith("step 1/"):
                        seconds.append(time.perf_counter() - began)
                        process.kill()
                        break
    report.add(
        "from the command to the first training step of the default run", statistics.median(seconds), 8, unit="s"
    )


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    flags = Path("/proc/cpuinfo").read_text().split("\n") if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in flags if line.startswith("model name")), platform.machine()
    )
    return f"{model}, {torch.get_num_threads()} threads"


def draw(report: Report, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in report.curves.items():
        style = {"color": "0.5", "linestyle": "--"} if name == "copy" else {}
        axes.plot([n for n, _ in points], [n / s / 1e9 for n, s in points], marker="o", label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("elements")
    axes.set_ylabel("10⁹ elements a second")
    axes.set_title("Quantise-dequantise of BF16, beside copying it (the roof)", loc="left")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def run_parts(report: Report, parts: list[str], device: torch.device, *, quick: bool) -> None:
    """Measure in this process."""
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
        report.add("bytes an NVFP4 linear saves for backward, per element of x", saved_bytes(), 0.6, unit="B")
    small = ["train.batch_size=2", "train.seq_len=32"] if quick else []
    if "recipes" in parts:
        bench_recipes(report, device, ["backend=emulate", *small], "default run")
    if "step" in parts:
        bench_step(report, device, ["backend=emulate", *small], "default run", 1.15)
        if not quick:
            large = ["backend=emulate", "model=llama_125m", "train.batch_size=2", "train.seq_len=1024"]
            bench_step(report, device, large, "llama_125m, 2048 tokens", 1.10)
        if device.type == "cuda":
            larger = ["model=llama_1b", "train.batch_size=8", "train.seq_len=2048"]
            with real_vocabulary(seq_len=2048) as data:
                bench_large_step(report, device, [*larger, *data], "llama_1b, 16384 tokens")


def run_processes(report: Report, parts: list[str], processes: int, options: list[str]) -> None:
    """Measure each part in `processes` fresh ones; a row is the median of theirs."""
    for part in parts:
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for i in range(processes):
                print(f"{part}: process {i + 1} of {processes}", file=sys.stderr, flush=True)
                out = Path(folder) / "part"
                command = [sys.executable, __file__, part, "--processes", "1", "--out", str(out), *options]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found.append(json.loads(out.with_suffix(".json").read_text()))
        for rows in zip(*(each["rows"] for each in found), strict=True):
            values = [row["value"] for row in rows]
            report.add(rows[0]["what"], values, rows[0]["target"], at_least=rows[0]["at_least"], unit=rows[0]["unit"])
        for name in found[0]["curves"]:
            points = zip(*(each["curves"][name] for each in found), strict=True)
            report.curves[name] = [(same[0][0], statistics.median(seconds for _, seconds in same)) for same in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="path without ending")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes for each part")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--dry-run", action="store_true", help="smallest sizes on a CPU; the figures mean nothing")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    parts, device, report = args.parts or list(PARTS), torch.device(args.device), Report(out=args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.dry_run:
        device, report.seconds = torch.device("cpu"), 0.0
    if args.processes == 1 or args.dry_run:
        run_parts(report, parts, device, quick=args.quick or args.dry_run)
    else:
        options = ["--device", args.device, *(["--quick"] if args.quick else [])]
        run_processes(report, parts, args.processes, options)
    name = machine_name(device)
    report.write({"machine": name, "torch": torch.__version__, "python": platform.python_version()})
    args.out.with_suffix(".md").write_text(report.markdown(name))
    if report.curves:
        draw(report, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
