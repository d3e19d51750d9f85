"""Kernels of steps that were measured on an H200, beside the model: benchmarks/cost_model.md has
the tables.
"""

import json
import re
from pathlib import Path

import pytest

from fp4train.cli import main
from fp4train.hardware import find_gpu
from fp4train.lab.costs import instructions
from fp4train.lab.costs.roofline import move_seconds

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "benchmarks" / "cost_model.md"
COUNTS = ROOT / "benchmarks" / "kernel_instructions.md"
VISIT = ROOT / "benchmarks" / "h200.json"
PAGE = ROOT / "docs" / "cost-model.md"
COUNTED = {
    "4 bits": "NVFP4 codes of both forms",
    "4 bits, stochastic": "NVFP4 stochastic codes of both forms",
    "8 bits": "MXFP8 codes of both forms",
    "8 bits, one scale": "FP8 codes of both forms",
    "amax": "amaxes of both forms of NVFP4",
    "amax, stochastic": "amaxes of both forms of NVFP4, smaller tiles",
    "4 bits decoded": "NVFP4 codes decoded",
    "8 bits decoded": "MXFP8 codes decoded",
}
"""Kernel of the model → its row of kernel_instructions.md."""
BEFORE = {
    "4 bits": 51.9,
    "4 bits, stochastic": 83.4,
    "8 bits": 42.3,
    "8 bits, one scale": 32.9,
    "amax": 17.3,
    "amax, stochastic": 20.0,
    "4 bits decoded": 10.4,
    "8 bits decoded": 13.3,
}
"""Instructions of the kernels that the measured steps ran, at commit 8128cb02 on 9.0: values and codes
of x, values of dy. MXFP8's have 43.8 and 41.4: their mean by elements.
"""
FUSED = "FP8 current, native, norms and gates that make codes"
"""The run whose norms and gates made codes, by kernels that are gone."""
MADE_CODES = {
    "norms": (2 * 2048, 1, 4, 24.8 + 38.8),
    "gates": (8192, 1, 6, 60.9 + 80.1),
    "gradients of gates": (8192, 2, 10, 144.2 + 188.2),
}
"""What made codes of FP8 at commit 7e2bfc18 → features of a block, results of each, bytes per element
of the kernel that makes them in BF16, and instructions per element, of the amaxes and of the codes:
SASS of 9.0, its loops counted as often as they run.
"""
RUNS = {
    "BF16": (("recipe=bf16",), "bf16, eager", 37.9),
    "BF16, compiled": (("recipe=bf16", "train.compile=true"), "bf16, compiled", 37.9),
    "NVFP4, emulated": (("recipe=nvfp4", "backend=emulate"), "nvfp4, emulated", 34.4),
    "MXFP8, emulated": (("recipe=mxfp8", "backend=emulate"), "mxfp8, emulated", 36.0),
    FUSED: (("recipe=fp8_current", "backend=native"), "fp8_current, eager", 35.4),
}
"""Run → its words, its row in the visit's record, and GiB that torch held at most: llama_1b, 16,384
tokens, a vocabulary of 128,256, every block in the recipe.
"""
KINDS = {
    "products": (("GEMM",), ("GEMMs", "GEMMs of the head")),
    "quantising": (("quantise",), ("quantising",)),
    "attention": (("attention",), ("attention",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "norms, elementwise, copies": (
        ("norm", "elementwise, copies"),
        ("elementwise", "casts, copies of weights"),
    ),
    "loss": (("loss",), ("loss",)),
}
"""Kind → its names in the record and in a plan."""


def measured(name: str) -> dict[str, float]:
    """Milliseconds of a run's kernels by the record: of all, and by kind."""
    rows = json.loads(VISIT.read_text("utf-8"))["computed later"]["profile"]
    (row,) = (row for row in rows if row["name"].startswith(RUNS[name][1]))
    return {"gpu ms": row["gpu ms"], **row["by kind"]}


def planned(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], gpu: str = "H200"
) -> tuple[dict[str, float], float]:
    """(Milliseconds of a step by part, GiB of tensors) by the model."""
    sizes = ("train.seq_len=2048", "train.batch_size=8", "policy=all", "phases=none")
    data = ("data=tokens", "data.path=tokens.bin", "data.vocab_size=128256")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["plan", "model=llama_1b", f"gpu={gpu}", "gpus=1", "--json", *words, *sizes, *data])
    assert ended.value.code == 0
    (cost,) = json.loads(capsys.readouterr().out)["stretches"]
    tensors = cost["memory_bytes_total"] - cost["memory_bytes"]["reserve"]
    return {part: 1e3 * seconds for part, seconds in cost["seconds"].items()}, tensors / 2**30


def made_codes() -> tuple[float, float]:
    """(Milliseconds of quantising, of elementwise kernels) that `FUSED` has beside the model's step,
    which writes BF16 and quantises it.
    """
    gpu = find_gpu("H200")
    issued = instructions.ISSUE * gpu.peaks["FP32"] / 2
    quantising = elementwise = 0.0
    for features, results, moved, count in MADE_CODES.values():
        elements = 16 * 16384 * features
        apart = move_seconds(gpu, 2 * elements) + max(
            move_seconds(gpu, 4 * elements), elements * BEFORE["8 bits, one scale"] / issued
        )
        quantising += elements * count / issued - results * apart
        elementwise -= move_seconds(gpu, moved * elements)
    return 1e3 * quantising, 1e3 * elementwise


def error(model: float, measured: float) -> str:
    return f"{100 * (model / measured - 1):+.0f} %".replace("-", "−")


def written(lines: list[str]) -> None:
    """Fail unless benchmarks/cost_model.md has the lines."""
    print("\n".join(lines))
    document = DOCUMENT.read_text("utf-8")
    assert [line for line in lines if line not in document] == []


@pytest.mark.long
def test_kernels_of_measured_steps_are_met_within_10_percent_by_the_counts_of_that_day(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    today = {name: sum(planned(run[0], capsys)[0].values()) for name, run in RUNS.items()}
    counts = {kernel: (count,) * len(instructions.COUNTED) for kernel, count in BEFORE.items()}
    monkeypatch.setattr(instructions, "INSTRUCTIONS", counts)
    lines = []
    for name, (words, _, held) in RUNS.items():
        parts, memory = planned(words, capsys)
        if name == FUSED:
            quantising, elementwise = made_codes()
            parts["quantising"] += quantising
            parts["elementwise"] += elementwise
        seen = measured(name)
        whole = seen["gpu ms"]
        step = sum(parts.values())
        assert step == pytest.approx(whole, rel=0.10)
        assert 1 < memory / held < 1.3
        times = f"{whole} | {step:.0f} | {error(step, whole)} | {today[name]:.0f}"
        lines.append(f"| {name} | {times} | {held} | {memory:.1f} | {error(memory, held)} |")
        if name == "BF16, compiled":
            continue
        cells = []
        for names, planned_parts in KINDS.values():
            time = sum(seen.get(kind, 0.0) for kind in names)
            model = sum(parts.get(part, 0.0) for part in planned_parts)
            cells.append(f"{time:.1f} / {model:.1f}, {error(model, time)}" if time else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    written(lines)


@pytest.mark.parametrize("kernel", COUNTED)
def test_kernels_have_the_instructions_that_were_counted(kernel: str) -> None:
    """By compute capability."""
    page = COUNTS.read_text("utf-8")
    (row,) = re.findall(rf"^\| {COUNTED[kernel]} \| (.+) \|$", page, re.MULTILINE)
    counts = tuple(float(cell.split(" → ")[1]) for cell in row.split(" | "))
    assert instructions.INSTRUCTIONS[kernel] == counts


@pytest.mark.long
def test_the_page_has_the_steps_of_an_h100_which_emulates_formats_of_four_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvfp4, bf16, mxfp8 = (
        sum(planned((f"recipe={recipe}",), capsys, "H100")[0].values())
        for recipe in ("nvfp4", "bf16", "mxfp8")
    )
    sentence = f"{nvfp4:.0f} ms, in BF16 {bf16:.0f} ({nvfp4 / bf16:.2f}×), in MXFP8 {mxfp8:.0f}."
    assert sentence in PAGE.read_text("utf-8")
