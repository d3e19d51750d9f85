"""Steps that were measured on an H200, beside the model: benchmarks/cost_model.md has the table."""

import json
from pathlib import Path

import pytest

from fp4train.cli import main

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "benchmarks" / "cost_model.md"
PAGE = ROOT / "docs" / "cost-model.md"
SLOW = "FP8 current, native, norms and gates that make codes"
"""Its kernels of norms and gates were slow, which no estimate shows. They are gone, and that step has
not been measured since.
"""
RUNS = {
    "BF16": (("recipe=bf16",), 245.7, 37.9),
    "BF16, compiled": (("recipe=bf16", "train.compile=true"), 243.8, 37.9),
    "NVFP4, emulated": (("recipe=nvfp4", "backend=emulate"), 284.8, 34.4),
    "MXFP8, emulated": (("recipe=mxfp8", "backend=emulate"), 270.6, 36.0),
    SLOW: (("recipe=fp8_current", "backend=native"), 259.9, 35.4),
}
"""Run → its words, milliseconds of a step, and GiB that torch held at most: llama_1b, 16,384 tokens,
a vocabulary of 128,256, every block in the recipe.
"""


def planned(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], gpu: str = "H200"
) -> tuple[float, float]:
    """(Milliseconds of a step, GiB of tensors) by the model."""
    sizes = ("train.seq_len=2048", "train.batch_size=8", "policy=all", "phases=none")
    data = ("data=tokens", "data.path=tokens.bin", "data.vocab_size=128256")
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["plan", "model=llama_1b", f"gpu={gpu}", "gpus=1", "--json", *words, *sizes, *data])
    assert ended.value.code == 0
    (cost,) = json.loads(capsys.readouterr().out)["stretches"]
    tensors = cost["memory_bytes_total"] - cost["memory_bytes"]["reserve"]
    return 1e3 * cost["step_seconds"], tensors / 2**30


def error(model: float, measured: float) -> str:
    return f"{100 * (model / measured - 1):+.0f} %".replace("-", "−")


@pytest.mark.long
def test_measured_steps_are_met_within_5_percent_but_one_and_memory_is_not_underestimated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = []
    for name, (words, measured, held) in RUNS.items():
        step, memory = planned(words, capsys)
        assert name == SLOW or step == pytest.approx(measured, rel=0.05)
        assert 0.7 < step / measured < 1.05
        assert 1 < memory / held < 1.3
        times = f"{measured} | {step:.0f} | {error(step, measured)}"
        lines.append(f"| {name} | {times} | {held} | {memory:.1f} | {error(memory, held)} |")
    print("\n".join(lines))
    document = DOCUMENT.read_text("utf-8")
    assert [line for line in lines if line not in document] == []


@pytest.mark.long
def test_the_page_has_the_steps_of_an_h100_which_emulates_formats_of_four_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvfp4, bf16, mxfp8 = (
        planned((f"recipe={recipe}",), capsys, "H100")[0] for recipe in ("nvfp4", "bf16", "mxfp8")
    )
    sentence = f"{nvfp4:.0f} ms, in BF16 {bf16:.0f} ({nvfp4 / bf16:.2f}×), in MXFP8 {mxfp8:.0f}."
    assert sentence in PAGE.read_text("utf-8")
