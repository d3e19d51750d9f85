"""An export holds a piece of a tensor at a time, whatever the size of the model."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import reseal_config
from finished_runs import FinishedRuns
from memory import most_memory

from fp4train import checkpoint
from fp4train.config import to_config
from fp4train.exchange import Measures, export_huggingface, export_quantised, verify
from fp4train.run.record import directory as run_directory

RUN = ("train.steps=2", "phases=none")
LLAMA = ("width=1024", "layers=2", "heads=8", "kv_heads=8", "hidden=8192")
EXPERTS = (
    "width=512",
    "layers=2",
    "dense=0",
    "heads=8",
    "kv_heads=8",
    "experts.count=16",
    "experts.hidden=1024",
)
MOE = (
    "model=moe_tiny",
    "model.width=32",
    "model.layers=2",
    "model.dense=0",
    "model.experts.hidden=32",
)


def large(run: Path, into: Path, shape: tuple[str, ...]) -> Path:
    """A copy of a run with another shape, and a checkpoint of zeros that fits it."""
    shutil.copytree(run, into)

    def change(values: dict[str, Any]) -> None:
        for key, _, value in (word.partition("=") for word in shape):
            *above, last = key.split(".")
            table = values["model"]
            for part in above:
                table = table[part]
            table[last] = int(value)

    reseal_config(into, change)
    config = to_config(run_directory.read_config(into))
    with torch.device("meta"):
        model = config.model.build(vocab_size=257, seq_len=32)
    weights = {f"model/{name}": torch.zeros(p.shape) for name, p in model.state_dict().items()}
    state = checkpoint.load(into / "checkpoints").state
    checkpoint.save(into / "checkpoints", 3, weights, state, keep=1)
    return into


def check_memory(act: Callable[[], object]) -> None:
    """Fails where `act` takes 134 MB, two thirds of the weights."""
    taken = most_memory(act)
    assert taken < 2**27, f"{taken / 1e6:.0f} MB"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "shape", "layout"),
    [
        ((*RUN, "recipe=fp32"), LLAMA, "hf"),
        ((*RUN, "recipe=nvfp4", "eval.errors_every=1"), LLAMA, "compressed-tensors"),
        ((*RUN, "recipe=mxfp8", *MOE), EXPERTS, "modelopt"),
    ],
)
def test_an_export_takes_the_memory_of_a_piece_of_a_tensor(
    finished: FinishedRuns,
    tmp_path: Path,
    words: tuple[str, ...],
    shape: tuple[str, ...],
    layout: str,
) -> None:
    """Of 200 MB of weights not 134 MB are held, nor where the codes are verified: pieces of 4 MB,
    and what allocators and threads keep the first time.
    """
    run = large(finished(*words), tmp_path / "b", shape)
    out = tmp_path / "out"
    (weights,) = (run / "checkpoints").glob("*/weights.safetensors")
    assert weights.stat().st_size > 200e6

    def export(run: Path, out: Path) -> None:
        if layout == "hf":
            export_huggingface(run, out)
        else:
            export_quantised(run, out, layout, measures=Measures(losses=False))

    # first a small run, which imports what it takes
    small = finished(*words)
    export(small, tmp_path / "small")
    if layout != "hf":
        assert verify(tmp_path / "small", small).equal
    check_memory(lambda: export(run, out))
    if layout != "hf":
        check_memory(lambda: verify(out, run))
    assert out.is_dir()
