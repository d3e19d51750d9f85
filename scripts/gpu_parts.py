"""The parts of `gpu_check.py`: the programs that each runs, in order, and what each asks of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"

PARTS = {
    "nine": "a first visit: one kernel, or stop; first steps and exactness; bandwidth; "
    "profile; resume to the bit",
    "first": "a minute: kernels, liger's too, each `scaled_mm`, steps, capture, compile, "
    "deterministic, recompute",
    "kernels": "bandwidth of the Triton kernels beside that of a device copy; their bits "
    "against the reference",
    "te": "Transformer Engine beside the emulation: reference, kernels, given weights, experts",
    "native": "`fp4train doctor`; `scaled_mm`, and `scaled_grouped_mm` of experts, against "
    "the emulation",
    "profile": "where a step of llama_1b goes: kernels, host beside GPU, memory, attention; "
    "eager, compiled, recorded",
    "state": "resumed and recomputed runs against straight ones to the bit; the time of a "
    "checkpoint",
    "steps": "times of quantisers, linear layers and training steps; recorded steps against "
    "eager ones",
    "runs": "short runs, compared",
    "hours": "writes the commands of training comparisons that need hours, and starts none",
    "sanitize": "the kernels under compute-sanitizer, only where it is asked for",
}
ASKED_FOR = ("nine", "sanitize")
"""Parts that run only where they are named; `nine` also by `--total` alone."""
WITHOUT_GPU = ("hours",)
"""Parts that ask nothing of a GPU."""
NINE = 540.0
"""Seconds for which the limits of the steps of `nine` are meant; with others they are stretched or
shortened.
"""
TRAINED = ("bf16", "nvfp4", "mxfp8", "fp8_current")
"""Recipes of the part `runs`."""
COMPARED = ("bf16", "fp8_current", "mxfp8", "nvfp4")
"""Recipes of the comparisons that need hours."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One program.

    Args:
        name: in NAME.done.
        asks: what it measures on a GPU.
        words: of the command; the first is a script of this folder, "fp4train", or another program.
        dry: more words in a dry run; None: nothing stands in for what it needs, and it is only
            named there.
        limit: seconds that it may take, where its part has `NINE`; None: as long as its part.
        gate: whether its part goes on only if this step ended well.
        beside: steps that run while this one does.
    """

    name: str
    asks: str
    words: tuple[str, ...]
    dry: tuple[str, ...] | None = ("--dry-run",)
    limit: float | None = None
    gate: bool = False
    beside: tuple[Step, ...] = ()

    def command(self) -> list[str]:
        first, *rest = self.words
        if first == "fp4train":
            return [sys.executable, "-u", "-m", "fp4train", *rest]
        return (
            [sys.executable, "-u", str(SCRIPTS / first), *rest]
            if first.endswith(".py")
            else [first, *rest]
        )

    def program(self) -> str | None:
        """The program that must be installed; None: Python and what this checkout has."""
        first, *rest = self.words
        if first == "fp4train" or first.endswith(".py"):
            return None
        return rest[1] if first == "env" else first


def steps_of(part: str, out: Path, te: Path | None, *, dry: bool = False) -> Iterator[Step]:
    """What a part runs, in order. A generator: what comes later may depend on what was written
    before.
    """

    def results(ending: str) -> tuple[str, str]:
        return "--out", f"{out}-{ending}"

    words: tuple[str, ...]
    if part == "nine":
        yield from nine_steps(out)
    elif part == "first":
        yield Step(
            name="first", asks=PARTS["first"], words=("gpu_first.py", *results("first.json"))
        )
    elif part == "kernels":
        asks = "GB/s of each kernel beside a copy's; TFLOP/s of products"
        yield Step(
            name="bandwidth", asks=asks, words=("gpu_bandwidth.py", *results("bandwidth.json"))
        )
        asks = "all cases and one of more than 2^31 elements to the bit"
        yield Step(name="kernels", asks=asks, words=("gpu_kernels.py", *results("kernels.json")))
    elif part == "te":
        if te is not None:
            asks = "that the carried Transformer Engine builds against this machine's PyTorch"
            words = ("bash", str(te / "install.sh"), str(site_of(out)))
            yield Step(name="te install", asks=asks, words=words, dry=None)
        asks = (
            "y, dx and dw of Transformer Engine's reference modules (reference), its kernels "
            "in 20 recipes (native), "
            "with weights that fp4train's kernels quantise (weights), and their times (time)"
        )
        yield Step(name="te", asks=asks, words=("te_selfcheck.py", *results("te.json")))
        asks = (
            "y, dx and dw of eight experts on Transformer Engine's GroupedLinear in 6 recipes, "
            "and their times"
        )
        words = ("gpu_experts.py", "--backend", "te", *results("experts-te.json"))
        yield Step(name="te experts", asks=asks, words=words)
    elif part == "native":
        asks = "what each recipe runs on here, and its codes and products beside the reference's"
        yield Step(name="doctor", asks=asks, words=("fp4train", "doctor", "--json"), dry=())
        asks = "BF16 products of codes equal, in every bit, to what is known of this GPU's sums"
        yield Step(name="native sums", asks=asks, words=("gpu_sums.py", *results("sums.json")))
        asks = "y, dx and dw of 13 recipes through torch's scaled products, and their times"
        yield Step(name="native", asks=asks, words=("gpu_native.py", *results("native.json")))
        asks = (
            "y, dx and dw of eight experts, where one call of scaled_grouped_mm multiplies "
            "all, and their times"
        )
        words = ("gpu_experts.py", "--backend", "native", *results("experts.json"))
        yield Step(name="native experts", asks=asks, words=words)
    elif part == "profile":
        yield Step(
            name="profile",
            asks=PARTS["profile"],
            words=("gpu_profile.py", *results("profile.json")),
        )
    elif part == "state":
        asks = (
            "losses and weights of resumed and of recomputed runs, equal to those of straight "
            "ones in every bit"
        )
        yield Step(name="state", asks=asks, words=("gpu_state.py", *results("state.json")))
        asks = "how long a checkpoint of llama_1b holds the loop up, and how long it is written"
        words = (
            "checkpoint_cost.py",
            "model=llama_1b",
            "checkpoints=2",
            f"out={out}-checkpoint.md",
        )
        tiny = ("model=llama_tiny", "checkpoints=1", "device=cpu", "between=2")
        yield Step(name="checkpoint", asks=asks, words=words, dry=tiny)
    elif part == "steps":
        for each in ("quantize", "scaling", "linear", "step"):
            words = ("benchmark.py", each, "--processes", "1", *results(each))
            yield Step(
                name=f"steps {each}", asks=f"the rows of benchmarks/ for `{each}`", words=words
            )
        asks = (
            "losses of recorded steps and blocks (compiled, of experts) equal to those of "
            "eager ones, and their time"
        )
        yield Step(name="steps graph", asks=asks, words=("gpu_graph.py", *results("graph.json")))
    elif part == "runs":
        yield from run_steps(out, dry)
    elif part == "hours":
        asks = "nothing: it writes the commands, for people who have the hours"
        yield Step(
            name="hours", asks=asks, words=("gpu_check.py", str(out), "--write-hours"), dry=()
        )
    else:
        asks = "no access out of bounds and no race in any kernel"
        cached = ("gpu_kernels.py", "--sanitize")
        yield Step(
            name="sanitize compile",
            asks="compiles the kernels in as many processes as cores",
            words=cached,
        )
        words = (
            "env",
            "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
            "compute-sanitizer",
            "--error-exitcode",
            "1",
        )
        checked = (
            sys.executable,
            str(SCRIPTS / "gpu_kernels.py"),
            "--sanitize",
            "--processes",
            "1",
        )
        yield Step(name="sanitize", asks=asks, words=(*words, *checked), dry=None)


def nine_steps(out: Path) -> Iterator[Step]:
    """What the first nine minutes on a GPU are for. The limits leave time for a look at the machine
    and for packing.

    First compiled kernels that are equal, without which nothing else counts; speeds before long
    lists of cases; what would take minutes of compiling alone, Transformer Engine's build among it,
    is left to other parts.
    """

    def results(ending: str) -> tuple[str, str]:
        return "--out", f"{out}-{ending}"

    asks = "that a Triton kernel compiles, and that its codes are the reference's in every bit"
    words: tuple[str, ...]
    first = ("gpu_first.py", *results("first.json"))
    yield Step(name="nine kernel", asks=asks, words=(*first, "kernel"), limit=45, gate=True)
    asks = (
        "codes, scales, amaxes and values to the bit, of the kernels that a training run launches"
    )
    words = (
        "gpu_kernels.py",
        "--launched",
        "--no-large",
        "--processes",
        "8",
        *results("exact.json"),
    )
    exact = Step(name="nine exact", asks=asks, words=words)
    asks = (
        "first steps: each `scaled_mm`, liger, recipes, capture, compile, deterministic, recompute"
    )
    words = (*first, "--patience", "120")
    yield Step(name="nine first", asks=asks, words=words, limit=190, beside=(exact,))
    asks = (
        "BF16 products of FP8 (and of MXFP8 and NVFP4 where they run) equal to what is known "
        "of this GPU's sums"
    )
    yield Step(name="nine sums", asks=asks, words=("gpu_sums.py", *results("sums.json")), limit=25)
    asks = (
        "GB/s of a copy and of the kernels of a training step; TFLOP/s of products in BF16 and "
        "in codes"
    )
    words = ("gpu_bandwidth.py", "--few", *results("bandwidth.json"))
    yield Step(name="nine bandwidth", asks=asks, words=words, limit=35)
    asks = (
        "a step of llama_1b in one process: BF16, emulated NVFP4 and MXFP8, FP8 current, "
        "eager; BF16 recorded and "
        "compiled; the time of each kernel, of the host, and of the passes of the factors"
    )
    words = ("gpu_profile.py", "--nine", *results("profile.json"))
    yield Step(name="nine profile", asks=asks, words=words, limit=170)
    asks = (
        "losses and weights of a resumed and of a recomputed run in NVFP4, equal to a straight "
        "one's in every bit"
    )
    words = ("gpu_state.py", "--recipes", "nvfp4", *results("state.json"))
    yield Step(name="nine state", asks=asks, words=words, limit=60)


def run_steps(out: Path, dry: bool) -> Iterator[Step]:
    """Short runs, each of which goes on from its last checkpoint, and what compares those that
    ended.

    Args:
        dry: whether they lie beside the other results, not in runs/.
    """
    tiny = (
        "model=llama_tiny",
        "train.steps=4",
        "train.batch_size=2",
        "train.seq_len=16",
        "checkpoint.every=2",
    )
    folder = out.parent if dry else ROOT / "runs"
    runs = {recipe: folder / f"{out.name}-{recipe}" for recipe in (*TRAINED, "nvfp4-compiled")}
    for recipe, run in runs.items():
        if again := (run / "checkpoints").is_dir():
            words = ["fp4train", f"resume={run}"]
        else:
            words = ["fp4train", f"recipe={recipe.removesuffix('-compiled')}"]
            words += ["train.compile=true"] * recipe.endswith("-compiled")
            words += [
                "model=llama_125m",
                "train.steps=200",
                "train.batch_size=32",
                "train.seq_len=1024",
                "track=jsonl",
            ]
            words += [
                "checkpoint.every=50",
                f"run.name={run.name}",
                f"run.dir={run}",
                "run.overwrite=true",
            ]
        asks = f"200 steps of llama_125m in {recipe}: losses, tokens per second, memory"
        on_cpu = ("device=cpu",) if again else ("device=cpu", *tiny)
        yield Step(name=f"run {recipe}", asks=asks, words=tuple(words), dry=on_cpu)
    ended = [str(run) for run in runs.values() if (run / "metrics.jsonl").exists()]
    if len(ended) > 1:
        yield Step(
            name="compare",
            asks="the losses of the runs beside each other",
            words=("fp4train", "compare", *ended, f"out={out}-runs.png"),
            dry=(),
        )


def hours(name: str) -> str:
    """A shell script of comparisons that need hours."""
    lines = [
        "#!/usr/bin/env bash",
        "# Training comparisons, for about 40 GPU hours on one H200 or 20 on one B200 (an "
        "estimate):",
        "#   DATA=tokens.bin VOCABULARY=128256 bash THIS_FILE      token ids, as "
        "docs/data.md describes",
        "set -euo pipefail",
        'data=(data=tokens "data.path=$DATA" "data.vocab_size=$VOCABULARY")',
    ]
    common = (
        "model=llama_350m train.steps=10000 train.batch_size=256 train.microbatch=32 "
        "train.seq_len=1024 track=jsonl"
    )
    finished = []
    for seed in range(3):
        for recipe in COMPARED:
            run = f"{name}-350m-{recipe}-{seed}"
            finished.append(f"runs/{run}")
            options = f"recipe={recipe} run.seed={seed} checkpoint.every=500 run.name={run}"
            lines.append(
                f"if [ -d runs/{run}/checkpoints ]; then fp4train resume=runs/{run}; "
                f'else fp4train "${{data[@]}}" {common} {options}; fi'
            )
    lines.append(f"fp4train compare {' '.join(finished)} out=runs/{name}-350m.png")
    return "\n".join(lines) + "\n"


def site_of(out: Path) -> Path:
    """Where a carried Transformer Engine is installed."""
    return out.with_name(f"{out.name}.site")
