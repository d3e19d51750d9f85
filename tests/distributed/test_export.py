"""An export of a checkpoint of several ranks is that of one rank, in every byte."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fp4train import checkpoint
from fp4train.exchange import export_huggingface

pytestmark = pytest.mark.long

Ranks = Any
NVFP4 = ("recipe=nvfp4", "policy=all")
CUTS = {
    "shards": ((), ("train.microbatch=2",)),
    "stages": (
        ("parallel.pp=2", "train.microbatch=1", "model.layers=4"),
        ("train.microbatch=1", "model.layers=4"),
    ),
}


def files(folder: Path) -> dict[str, bytes]:
    """What it holds but for the model card, which names the run and the number of its ranks."""
    return {
        name: (folder / name).read_bytes() for name in os.listdir(folder) if name != "README.md"
    }


@pytest.mark.parametrize("cut", CUTS)
def test_two_ranks_export_what_one_rank_does(ranks: Ranks, tmp_path: Path, cut: str) -> None:
    options, alone = CUTS[cut]
    ranks.train(2, "two", *NVFP4, *options)
    found = export_huggingface(ranks.run("two"), tmp_path / "two")
    export_huggingface(ranks.reference(*NVFP4, *alone), tmp_path / "one")
    assert len(list(ranks.run("two").glob("checkpoints/*/weights-*"))) == 2
    assert files(tmp_path / "two") == files(tmp_path / "one") and len(files(tmp_path / "one")) == 7
    assert found.step == 4 and "2 ranks" in (tmp_path / "two/README.md").read_text()


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, ("parallel.tp=2", "model.kv_heads=2")),
        (4, ("parallel.tp=2", "parallel.dp_shard=2", "model.kv_heads=2", "model.tied=false")),
    ],
)
def test_parts_of_matrices_are_put_together(
    ranks: Ranks, tmp_path: Path, count: int, options: tuple[str, ...]
) -> None:
    """Tensor parallelism sums in another order, so the same weights are stored as one rank
    would.
    """
    ranks.train(count, "parts", *NVFP4, *options)
    run = ranks.run("parts")
    whole = ranks.run("whole")
    shutil.copytree(run, whole)
    found = checkpoint.load(whole / "checkpoints")
    checkpoint.save(whole / "checkpoints", found.step, dict(found.tensors), found.state, keep=1)
    assert (whole / "checkpoints" / found.path.name / "weights.safetensors").exists()
    for each in (run, whole):
        export_huggingface(each, tmp_path / each.name)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
