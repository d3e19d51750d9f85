"""Where a step on one GPU goes: the page's table, and parts counted by hand elsewhere."""

from pathlib import Path

import pytest
from llama_shapes import measured

from fp4train.cli import main
from fp4train.hardware import find_gpu
from fp4train.lab.costs import cluster
from fp4train.lab.costs.roofline import gemm_seconds
from fp4train.precision import NVFP4

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "cost-model.md"
COMPARISON = ROOT / "benchmarks" / "cost_model.md"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The table of a step of llama_1b, 16,384 tokens of a vocabulary of 128,256, with its notes."""
    sizes = [
        "data=tokens",
        "data.path=tokens.bin",
        "data.vocab_size=128256",
        "train.seq_len=2048",
        "train.batch_size=8",
    ]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["plan", "model=llama_1b", *words, "policy=all", "phases=none", *sizes])
    assert not ended.value.code
    table = capsys.readouterr().out.partition("where a step goes")[2]
    return table.partition("\naudits: ")[0].strip("\n")


def milliseconds(table: str, column: int) -> dict[str, float]:
    """A column of the table."""
    rows = [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in table.splitlines()[2:]
    ]
    found = {}
    for name, *cells in filter(lambda row: len(row) > 1, rows):
        number, unit, *_ = (cells[column] + " -").split()
        if unit in ("ms", "µs"):
            found[name] = float(number) / (1000 if unit == "µs" else 1)
    return found


COLUMNS = (
    ("H200", "recipe=fp8_current", 0),
    ("H200", "recipe=fp8_current", 1),
    ("B200", "recipe=nvfp4", 1),
)
"""GPU, recipe, column of its table: BF16, FP8, NVFP4."""
COUNTED = {
    "GEMMs": (137, 83, 24),
    "quantising or casts, copies of weights": (4, 16, 12),
    "attention": (17, 17, 9),
    "elementwise": (31, 31, 21),
    "GEMMs of the head": (37, 37, 16),
    "loss": (31, 31, 20),
    "optimizer": (12, 12, 8),
    "together": (270, 230, 110),
}
"""Milliseconds by an independent count with other rates (H200 700 TFLOP/s in BF16, 1150 in FP8, 4.3
TB/s; B200 1600, 5000 in FP4, 6.5 TB/s), with torch's operators at the speed of a copy.
"""
VOCABULARY = 128256
TOKENS = 16384
"""Sizes of the loss of llama_1b."""


def test_the_parts_of_a_step_are_those_of_an_independent_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = COMPARISON.read_text("utf-8")
    monkeypatch.setattr(cluster, "EAGER", 1.0)
    tables = {
        gpu: printed(capsys, f"gpu={gpu}", recipe, "train.kernels=torch")
        for gpu, recipe, _ in COLUMNS
    }
    columns = [milliseconds(tables[gpu], column) for gpu, _, column in COLUMNS]
    for name, counts in COUNTED.items():
        found = [sum(each.get(part, 0.0) for part in name.split(" or ")) for each in columns]
        cells = (f"{count} / {value:.3g}" for count, value in zip(counts, found, strict=True))
        assert f"| {name} | {' | '.join(cells)} |" in comparison
        assert found == pytest.approx(list(counts), rel=0.24)


@pytest.mark.long
def test_the_table_prices_the_kernels_that_run_and_names_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Per logit, 2 bytes of BF16: three passes of liger's kernel; torch's operators move 52."""
    own, torchs = (
        printed(capsys, "gpu=B200", "recipe=nvfp4", *each)
        for each in ((), ("train.kernels=torch",))
    )
    assert "liger's kernels (train.kernels=auto)" in own and "torch's operators" in torchs
    assert own in DOCUMENT.read_text("utf-8")
    parts = milliseconds(own, 1)
    added = sum(each for name, each in parts.items() if name != "together")
    assert added == pytest.approx(parts["together"], rel=0.01)
    others = milliseconds(torchs, 1)
    logits = TOKENS * VOCABULARY
    speed = 0.9 * find_gpu("B200").bandwidth
    assert parts["loss"] == pytest.approx(3 * 2 * logits / speed * 1e3, rel=0.005)
    assert others["loss"] == pytest.approx(52 * logits / speed * 1e3, rel=0.005)
    sizes = [(TOKENS, VOCABULARY, 2048), (TOKENS, 2048, VOCABULARY), (VOCABULARY, 2048, TOKENS)]
    head = sum(gemm_seconds(find_gpu("B200"), "BF16", *size) for size in sizes)
    head /= find_gpu("B200").sustained
    assert parts["GEMMs of the head"] == pytest.approx(1e3 * head, rel=0.005)
    assert parts["elementwise"] < others["elementwise"] / 2
    said = (
        "`train.kernels=torch` elementwise takes {elementwise} ms, the loss {loss} ms, and all "
        "{together:.0f} ms"
    )
    assert said.format(**others) in DOCUMENT.read_text("utf-8")
    changed = {"elementwise", "loss", "together"}
    assert {name: parts[name] for name in parts if name not in changed} == {
        name: others[name] for name in others if name not in changed
    }


@pytest.mark.long
def test_ligers_kernels_move_what_is_stated_of_them_in_a_block() -> None:
    """Two norms, one gate, and rotated queries and keys; compiled blocks are the compiler's."""
    gpu = find_gpu("B200")
    tokens = 8192
    width = 4096
    hidden = 14336
    heads = (32 + 8) * 128
    torchs, own, compiled = (
        measured("8B", NVFP4(), gpu, compiled=compiled, liger=each).blocks[0]
        for each, compiled in ((False, False), (True, False), (True, True))
    )
    for work, moved in ((own.forward, (4, 4, 6, 4)), (own.backward, (6, 6, 10, 4))):
        widths = zip(moved, (width, width, hidden, heads), strict=True)
        assert work.kernels == tokens * sum(bytes_ * size for bytes_, size in widths)
    assert torchs.forward.kernels == 8 * tokens * width
    assert torchs.backward.kernels == 12 * tokens * width
    assert own.saved < torchs.saved
    assert own.forward.operators < torchs.forward.operators / 5
    assert compiled.forward == torchs.forward
