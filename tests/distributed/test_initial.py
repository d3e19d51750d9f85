"""Several ranks that begin with a Hugging Face folder: they compute as one, and each reads its part
alone.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from patches import GRAPHS

from fp4train.exchange import export_huggingface

pytestmark = pytest.mark.long

Ranks = Any
SHAPE = ("model.width=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.hidden=96")
"""That of the folders, which the tests' usual shape would contradict."""
FP32 = (*SHAPE, "recipe=fp32", "schedule.warmup=0", "train.steps=2", "eval.every=0")
PATCH = """
import json, os
from pathlib import Path
import fp4train.checkpoint.reading as reading
original, count = reading.read_box, [0]
def read_box(descriptor, box, into, offsets):
    count[0] += (found := original(descriptor, box, into, offsets))
    Path(f"read.{os.environ['RANK']}").write_text(str(count[0]))
    return found
reading.read_box = read_box
"""


def same(ranks: Ranks, one: Path, other: str) -> None:
    """Losses and norms of all steps."""
    pairs = list(zip(ranks.losses(one), ranks.losses(other), strict=True))
    assert len(pairs) == 2
    for number, (a, b) in enumerate(pairs):
        assert b["train/loss"] == pytest.approx(
            a["train/loss"], rel=1e-6 if number == 0 else 1e-5
        ), number
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-5), number


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen2", "parallel.tp=2"),
        ("qwen3", "parallel.tp=2 parallel.sp=false"),
        ("llama-3", "parallel.dp_shard=2"),
        ("qwen3", "parallel.pp=2 train.microbatch=1"),
        ("qwen3", "parallel.tp=2 train.compile=true"),
    ],
)
def test_two_ranks_that_begin_with_a_folder_train_as_one(
    ranks: Ranks, folders: dict[str, Path], name: str, mesh: str
) -> None:
    begin = (*FP32, f"init={folders[name]}")
    ranks.train(
        2, "two", *begin, *mesh.split(), patch=GRAPHS if mesh.startswith("parallel.tp") else ""
    )
    same(
        ranks,
        ranks.reference(
            *begin, *(each for each in mesh.split() if each.startswith("train.microbatch"))
        ),
        "two",
    )


def test_tensor_parallel_stages_that_begin_with_a_folder_train_as_one_rank(
    ranks: Ranks, folders: dict[str, Path]
) -> None:
    begin = (*FP32, f"init={folders['qwen3']}", "train.microbatch=1")
    ranks.train(4, "four", *begin, "parallel.tp=2", "parallel.pp=2")
    same(ranks, ranks.reference(*begin), "four")


@pytest.mark.parametrize(
    "mesh", ["parallel.tp=2", "parallel.dp_shard=2", "parallel.pp=2 train.microbatch=1"]
)
def test_a_rank_reads_its_part_of_the_folder_alone(
    ranks: Ranks, folders: dict[str, Path], mesh: str
) -> None:
    """Norms and what other layers leave whole are read by each rank; all of it is little more than
    half.
    """
    folder = folders["qwen3"]
    ranks.train(2, "two", *FP32, f"init={folder}", *mesh.split(), patch=PATCH)
    whole = (folder / "model.safetensors").stat().st_size / 4
    for rank in range(2):
        assert 0.4 < int((ranks.folder / f"read.{rank}").read_text()) / whole < 0.6


def test_a_run_of_two_ranks_is_resumed_on_one(ranks: Ranks, folders: dict[str, Path]) -> None:
    begin = (*FP32, f"init={folders['qwen2']}")
    ranks.train(2, "two", *begin, "parallel.tp=2", "train.steps=1", "schedule=constant")
    ended = ranks(1, "resume=runs/two", "train.steps=2", "parallel.tp=1")
    assert ended.codes == [0], ended.err
    assert [line["step"] for line in ranks.losses("two")] == [1, 2]


def test_a_damaged_folder_ends_all_ranks_with_one_message(
    ranks: Ranks, folders: dict[str, Path], tmp_path: Path
) -> None:
    import shutil

    folder = Path(shutil.copytree(folders["llama"], tmp_path / "broken"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 66, "head_dim": 16}))
    message = ranks(
        2, "run.name=a", *FP32[1:5], f"init={folder}", "model.width=66", "parallel.dp_shard=2"
    ).message
    assert "model.embed_tokens.weight is 320×64 and should be 320×66" in message


def test_weights_go_from_two_ranks_to_a_folder_and_back_to_two_in_every_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Cut by tensor parallelism and by FSDP; the shape has biases, and a folder of several
    files.
    """
    shape = ("model.kv_heads=2", "model.qkv_bias=true", "model.tied=false")
    ranks.train(2, "one", *shape, "parallel.tp=2", "train.steps=2", "schedule.warmup=0")
    folder = tmp_path / "hf"
    export_huggingface(ranks.run("one"), folder, shard=20_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    still = (
        "optim.lr=1e-30",
        "train.steps=1",
        "schedule=constant",
        "schedule.warmup=0",
        "phases=none",
    )
    ranks.train(2, "two", *shape, f"init={folder}", *still, "parallel.dp_shard=2")

    def weights(name: str) -> dict[str, bytes]:
        return {key: value for key, value in ranks.state(name).items() if key.startswith("model/")}

    assert weights("one") == weights("two") and len(weights("one")) == 27
