"""Numbers on the screens of `fp4train plan` are read without counting digits."""

import re
from pathlib import Path

import pytest

from fp4train.cli import main


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_numbers_of_a_mesh_are_grouped_and_have_no_exponents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "model=llama_8b data=tokens data.path=tokens.bin data.vocab_size=128256 gpu=GB200"
    mesh = "parallel.dp_shard=128 train.seq_len=8192 train.batch_size=1024 train.microbatch=1"
    assert run("plan", *words.split(), *mesh.split(), "train.steps=1") == 0
    shown = capsys.readouterr().out
    assert "1 step of 1,024 × 8,192 tokens, 8.39 M in all; tokens tokens.bin; " in shown
    assert "then wsd; " in shown
    assert "8.03 B parameters (vocabulary 128,256) on 128 GB200" in shown
    assert "8,388,608 tokens per step, 8 × 8,192 per data rank" in shown
    assert "step 0: NVFP4 (recipe)" in shown and "the whole run, 1 step: " in shown
    assert not re.findall(r"\de[+-]\d|0–0|\b1 steps|\d{5,}", shown)


@pytest.mark.long
def test_a_model_that_is_large_for_its_tokens_is_counted_in_billions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("data=tokens", "data.path=tokens.bin", "data.vocab_size=128256", "gpu=GB200")
    assert run("plan", "model=llama_8b", *words, "train.steps=1") == 0
    assert "8.03 B parameters learn 4.1 k tokens" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("", "weights and moments"),
        ("optim=sgd optim.momentum=0", "weights"),
        ("train.ema=0.9", "weights, moments and exponential average of weights"),
    ],
)
def test_the_states_of_a_checkpoint_are_listed_as_a_sentence(
    capsys: pytest.CaptureFixture[str], words: str, kept: str
) -> None:
    assert run("plan", "model=llama_tiny", *words.split()) == 0
    assert f" MB ({kept}); main memory" in " ".join(capsys.readouterr().out.split())


def test_the_operands_of_every_recipe_of_a_plan_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """E4M3·E4M3 in a row is MXFP8 or FP8 per tensor: the operands of both are told."""
    (tmp_path / "mixed.yaml").write_text(
        "_target_: fp4train.precision.LayerPolicy\n"
        "recipes:\n"
        "- {layers: [wq, wk], recipe: {_target_: fp4train.precision.MXFP8}}\n"
        "- {layers: [mlp.up], recipe: {_target_: fp4train.precision.NVFP4}}\n"
    )
    assert run("plan", "recipe=nvfp4", f"policy={tmp_path / 'mixed.yaml'}") == 0
    shown = capsys.readouterr().out
    assert "policy.recipes, wq, wk: MXFP8\nGEMM " in shown
    assert shown.count("\nGEMM ") == 2, "the run's own recipe and high precision are not repeated"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.tokens=1B train.steps=3", "both say how long a run is: give one of them"),
        ("train.tokens=many", "must be a number of tokens, as 1B, 500M or 1e9"),
        ("train.tokens=4095", "and a step has 4,096"),
    ],
)
def test_a_budget_that_gives_no_steps_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert run("plan", *words.split()) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_passes_over_large_token_files_are_told_without_reading_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4train.run.planned.SMALL", 1000)
    (tmp_path / "train.bin").write_bytes(bytes(200_000))
    (tmp_path / "train.txt").write_text("a few words\n" * 10_000)
    ids = ("data=tokens", f"data.path={tmp_path / 'train.bin'}", "data.vocab_size=500")
    text = ("data=text", f"data.path={tmp_path / 'train.txt'}")
    for data, passes in (((*ids, "data.val=0.5"), ", 25 passes over the data; "), (text, "; ")):
        assert run("plan", *data, "train.steps=300") == 0
        assert f"1.23 M in all{passes}" in " ".join(capsys.readouterr().out.split())
