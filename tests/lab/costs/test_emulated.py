"""The cost of a step whose blocks are emulated, on GPUs without the recipe's tensor cores."""

import re

import pytest

from fp4train.cli import main


@pytest.mark.parametrize(("recipe", "most"), [("nvfp4", 1.15), ("mxfp8", 1.13)])
def test_an_emulated_step_of_llama_1b_on_an_h100_takes_at_most_15_percent_longer_than_in_bf16(
    recipe: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """16,384 tokens, every block emulated, as `fp4train plan` shows it. By bytes: that cuBLAS
    multiplies as fast with a factor on the GPU as with one on the host is assumed, and no step was
    measured.
    """
    words = (
        "model=llama_1b",
        f"recipe={recipe}",
        "policy=all",
        "phases=none",
        "backend=emulate",
        "gpu=H100",
    )
    data = (
        "data=tokens",
        "data.path=tokens.bin",
        "data.vocab_size=128256",
        "train.seq_len=2048",
        "train.batch_size=8",
    )
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words, *data])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    (line,) = [
        line for line in shown.splitlines() if line.startswith("together ") and " ms" in line
    ]
    bf16, emulated = (float(text) for text in re.findall(r"([\d.]+) ms", line))
    assert 1 < emulated / bf16 <= most, line
