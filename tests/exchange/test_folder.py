"""A folder of weights is streamed, whole or not there at all, and read by the library of the
format.
"""

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import forked
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fp4train.checkpoint import StreamedTensor
from fp4train.checkpoint.model_folder import INDEX, WEIGHTS
from fp4train.errors import UserError
from fp4train.exchange import new_export, write_weights

KINDS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int64,
)


def made(rows: int = 5) -> dict[str, Tensor]:
    """Odd sizes of every dtype, smallest first, so that what is not reordered is not aligned."""
    return {
        f"t{n}": torch.arange(rows * 3).reshape(rows, 3).to(dtype)
        for n, dtype in enumerate(reversed(KINDS))
    }


def streamed(tensors: dict[str, Tensor], pieces: int = 2) -> list[StreamedTensor]:
    return [
        StreamedTensor(
            name=name, shape=tuple(t.shape), dtype=t.dtype, pieces=lambda t=t: t.split(pieces)
        )  # type: ignore[misc]
        for name, t in tensors.items()
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_one_file_is_what_the_library_of_the_format_reads(tmp_path: Path) -> None:
    tensors = made() | {"empty": torch.empty(0, 4), "one": torch.tensor([2.5])}
    with new_export(tmp_path / "out") as folder:
        assert write_weights(folder, streamed(tensors)) == sum(t.nbytes for t in tensors.values())
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == [WEIGHTS]
    back = load_file(tmp_path / "out" / WEIGHTS)
    assert set(back) == set(tensors) and all(same(back[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "out" / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(
            file.get_tensor(name).data_ptr() % t.dtype.itemsize == 0 for name, t in tensors.items()
        )


def test_shards_hold_what_fits_and_the_index_says_where(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.randn(10) for n in range(4)} | {"large": torch.randn(100)}
    heard: list[tuple[int, int | None, str]] = []
    with new_export(tmp_path / "out") as folder:
        write_weights(folder, streamed(tensors), shard=80, tell=lambda *told: heard.append(told))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 560}
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "out")) == [*names, INDEX]
    assert index["weight_map"] == dict(
        w0=names[0], w1=names[0], w2=names[1], w3=names[1], large=names[2]
    )
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / "out" / index["weight_map"][name])[name], tensor)
    assert heard == [(n, 5, name) for n, name in enumerate(tensors)]


def test_each_piece_is_made_when_the_one_before_is_written(tmp_path: Path) -> None:
    held = 0
    most = 0

    def pieces() -> Iterator[Tensor]:
        nonlocal held, most
        for _ in range(3):
            held += 1
            most = max(most, held)
            yield torch.ones(4)
            held -= 1

    each = [
        StreamedTensor(name=str(n), shape=(3, 4), dtype=torch.float32, pieces=pieces)
        for n in range(3)
    ]
    with new_export(tmp_path / "out") as folder:
        write_weights(folder, each)
    assert (held, most) == (0, 1)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([torch.ones(4)], "w: 16 bytes of torch.float32 [8] are missing"),
        ([torch.ones(9)], "w: a piece of torch.float32 [9] is none of torch.float32 [8]"),
        ([torch.ones(8).bfloat16()], "w: a piece of torch.bfloat16 [8] is none of"),
    ],
)
def test_pieces_that_do_not_make_their_tensor_leave_nothing(
    tmp_path: Path, pieces: list[Tensor], message: str
) -> None:
    wrong = StreamedTensor(name="w", shape=(8,), dtype=torch.float32, pieces=lambda: pieces)
    with pytest.raises(ValueError) as raised, new_export(tmp_path / "out") as folder:
        write_weights(folder, [wrong])
    assert message in str(raised.value) and os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "folder", "empty folder", "link"])
def test_what_is_there_is_never_written_over(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        out.symlink_to("nowhere")
    else:
        out.mkdir()
        if kind == "folder":
            (out / "mine").write_text("mine")
    with (
        pytest.raises(UserError, match="out is there already, and nothing is written over"),
        new_export(out),
    ):
        pytest.fail("nothing is begun")
    assert os.listdir(tmp_path) == ["out"] and (
        kind != "folder" or (out / "mine").read_text() == "mine"
    )


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def export() -> None:
        with new_export(tmp_path / "out") as folder:
            write_weights(folder, streamed(made()))

    with monkeypatch.context() as patch:
        patch.setattr(os, where, no_space)
        with pytest.raises(
            UserError, match=r"out is not written: .*No space left on device.*There is no folder"
        ):
            export()
    assert os.listdir(tmp_path) == []
    export()
    assert os.listdir(tmp_path) == ["out"]


def test_a_kill_leaves_no_folder_of_that_name_and_the_next_export_removes_what_it_left(
    tmp_path: Path,
) -> None:
    def killed() -> None:
        with new_export(tmp_path / "out") as folder:
            write_weights(folder, streamed(made()))
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked(killed) == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".out.") and os.listdir(tmp_path / left) == [WEIGHTS]
    with new_export(tmp_path / "out") as folder:
        assert not (tmp_path / left).exists()
        with pytest.raises(UserError, match="out is not written"), new_export(tmp_path / "out"):
            assert len(os.listdir(tmp_path)) == 2, "one that is being filled is not removed"
            write_weights(folder, streamed(made()))
            raise OSError("the second one fails")
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == [WEIGHTS]
