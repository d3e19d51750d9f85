"""What is saved comes back to the bit, whole or in parts; what others crafted is refused, and the
newest are kept.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from command_line import in_one_file
from limits import set_limit
from small_checkpoints import ONE, flip, reseal, save_steps
from torch import Tensor

from fp4train import checkpoint
from fp4train.checkpoint import (
    WEIGHTS,
    CheckpointError,
    StoredTensors,
    flatten,
    load,
    merged,
    save,
    steps,
    unflatten,
)
from fp4train.checkpoint.reading import File
from fp4train.checkpoint.tensors import DTYPES, Box
from fp4train.errors import UserError
from fp4train.files import Folder


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).bfloat16(),
        torch.randn(3, 4).to(torch.float8_e4m3fn),
        torch.randn(3, 4).to(torch.float8_e5m2),
        torch.arange(256, dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.empty(0, 5),
        torch.randn(4, 6).T,
        torch.randn(10, 10)[2:5, ::3],
        torch.randn(3).expand(4, 3),
        torch.tensor([math.nan, math.inf, -0.0]),
        torch.nn.Parameter(torch.randn(2)),
        torch.get_rng_state(),
    ],
    ids=lambda t: f"{str(t.dtype).removeprefix('torch.')}-{'x'.join(map(str, t.shape))}",
)
def test_every_kind_of_tensor_comes_back_to_the_bit(tmp_path: Path, tensor: Tensor) -> None:
    save(tmp_path, 1, {"t": tensor}, {}, keep=1)
    back = load(tmp_path).tensors["t"]
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and not back.requires_grad
    raw = tensor.detach().contiguous()
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw.reshape(-1).view(torch.uint8))


def test_the_path_of_a_checkpoint_may_be_a_text(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    assert checkpoint.steps(str(tmp_path)) == [1, 2]  # type: ignore[arg-type]
    assert checkpoint.load(str(tmp_path)).step == 2  # type: ignore[arg-type]


def test_tied_weights_are_stored_once_and_views_come_apart(tmp_path: Path) -> None:
    w = torch.randn(64, 64)
    path = save(tmp_path, 1, {"embed": w, "head": w, "row": w[3], "transposed": w.T}, {}, keep=1)
    assert (path / "tensors.safetensors").stat().st_size < 3 * w.nbytes
    back = load(tmp_path).tensors
    assert torch.equal(back["head"], w) and torch.equal(back["embed"], w)
    assert torch.equal(back["row"], w[3]) and torch.equal(back["transposed"], w.T)
    assert (
        set(back) == {"embed", "head", "row", "transposed"}
        and len(back) == 4
        and "nothing" not in back
    )


BOTH = {
    "model/w": torch.arange(6.0),
    "optimizer/state/0/exp_avg": torch.ones(6),
    "rng": torch.arange(3, dtype=torch.uint8),
}


def test_weights_lie_apart_and_are_read_without_the_rest(tmp_path: Path) -> None:
    """Tied weights stay weights, and a moment that is a weight's memory is stored as what it is."""
    tied = {"model/head": BOTH["model/w"], "optimizer/state/1/master": BOTH["model/w"]}
    path = save(tmp_path, 1, BOTH | tied, {"n": 1}, keep=1)
    assert sorted(os.listdir(path)) == ["state.json", "tensors.safetensors", "weights.safetensors"]
    assert set(safetensors.torch.load_file(path / "weights.safetensors")) == {"model/w"}
    assert dict(load(tmp_path).tensors).keys() == (BOTH | tied).keys()
    (path / "tensors.safetensors").write_bytes(b"damaged")
    found = load(tmp_path, kind=WEIGHTS)
    assert found.state == {"n": 1} and set(found.tensors) == {"model/w", "model/head"}
    assert torch.equal(found.tensors["model/head"], BOTH["model/w"])
    with pytest.raises(UserError, match=r"tensors\.safetensors has 7 bytes"):
        load(tmp_path)
    flip(path / "weights.safetensors")
    with pytest.raises(UserError, match=r"weights\.safetensors is damaged"):
        load(tmp_path, kind=WEIGHTS)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", [None, WEIGHTS])
def test_a_checkpoint_of_an_older_form_is_refused(
    tmp_path: Path, version: int, kind: str | None
) -> None:
    save(tmp_path, 1, BOTH, {"model": {}}, keep=1)
    in_one_file(save(tmp_path, 2, BOTH, {"model": {}}, keep=2), version)
    said = "of an older fp4train: it has checkpoint format version [12], which this one"
    with pytest.raises(
        UserError, match=f"step_00000002 is {said} does not read. Go on with the commit"
    ):
        load(tmp_path, kind=kind)


def test_an_optimiser_with_numbered_parameters_and_tuples_survives_the_tree(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "python": (3, (1, 2, 3), None),
        "a/b": {"c": torch.ones(1)},
        "a": {"b/c": torch.zeros(1), "$x": 1, "lr": 0.1 + 0.2, "nan": math.nan, "inf": [-math.inf]},
    }
    save(tmp_path, 5, *flatten(tree), keep=1)
    found = load(tmp_path)
    back = unflatten(found.tensors, found.state)
    assert back["python"] == (3, (1, 2, 3), None)
    assert back["optimizer"]["param_groups"] == tree["optimizer"]["param_groups"]
    assert set(back["optimizer"]["state"]) == {0, 1}
    assert torch.equal(
        back["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert torch.equal(back["a/b"]["c"], torch.ones(1)) and torch.equal(
        back["a"]["b/c"], torch.zeros(1)
    )
    assert (
        back["a"]["lr"] == 0.1 + 0.2
        and math.isnan(back["a"]["nan"])
        and back["a"]["inf"] == [-math.inf]
    )
    assert back["a"]["$x"] == 1
    optimizer.load_state_dict(back["optimizer"])


def test_what_a_checkpoint_cannot_hold_is_named_by_its_path() -> None:
    with pytest.raises(TypeError, match=r"data/1/file: PosixPath cannot be in a checkpoint"):
        flatten({"data": [1, {"file": Path("x")}]})


class Composed(torch.Tensor):
    """A tensor that consists of others, as torchao's moments."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


def test_a_tensor_without_values_of_its_own_is_not_written() -> None:
    moment = torch.zeros(2).as_subclass(Composed)
    with pytest.raises(TypeError, match=r"optimizer/w/m: Composed cannot be in a checkpoint"):
        flatten({"optimizer": {"w": {"m": moment}}})


def test_files_are_strict_json_and_hold_no_pickle(tmp_path: Path) -> None:
    path = save(tmp_path, 1, ONE, {"loss": math.nan}, keep=1)
    assert sorted(p.name for p in path.iterdir()) == ["state.json", "tensors.safetensors"]

    def refuse(token: str) -> None:
        raise AssertionError(token)

    body = json.loads((path / "state.json").read_text(), parse_constant=refuse)
    assert body["version"] == 3 and body["step"] == 1


def test_other_programs_read_the_tensors(tmp_path: Path) -> None:
    """The library of the format, which did not write the file."""
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.arange(7),
        "c": torch.randn(()),
        "d": torch.empty(0, 2),
    }
    path = save(tmp_path, 1, tensors, {}, keep=1)
    back = safetensors.torch.load_file(path / "tensors.safetensors")
    assert set(back) == set(tensors) and all(
        torch.equal(back[name], tensors[name]) for name in tensors
    )


HEADERS = {
    "no header": b"\xff" * 20,
    "a long header": (1 << 60).to_bytes(8, "little") + b"{}",
    "no table": b"[]",
    "an unknown dtype": {"w": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}},
    "an object for a shape": {"w": {"dtype": "F32", "shape": {"a": 1}, "data_offsets": [0, 4]}},
    "a negative size": {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    "outside of the file": {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    "a huge shape": {"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}},
    "half a description": {"w": {"dtype": "F32"}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_crafted_tensor_file_is_unusable_and_nothing_worse(tmp_path: Path, header: Any) -> None:
    path = save(tmp_path, 1, ONE, {}, keep=1)
    file = path / "tensors.safetensors"
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    if (not header.startswith(b"\xff") and len(header) < 10) or header.startswith(b"{"):
        header = len(header).to_bytes(8, "little") + header
    file.write_bytes(header + bytes(4))
    described = {
        "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    reseal(
        path / "state.json",
        lambda body: body.update(tensors={"files": {file.name: described}, "aliases": {}}),
    )
    with pytest.raises(
        UserError,
        match=r"no usable checkpoint in .*: step_00000001: tensors\.safetensors is damaged",
    ):
        load(tmp_path)


STATES = {
    "a list": [],
    "no tensors": {"tensors": None},
    "aliases of nothing": {"tensors": {"aliases": {"a": "nowhere"}}},
    "aliases in a list": {"tensors": {"aliases": ["a"]}},
    "a state that is a list": {"state": []},
    "a step that is text": {"step": "one"},
    "a version that is text": {"version": "one", "tensors": 3},
    "a float of nothing": {"state": {"a": {"$float": []}}},
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES.keys())
def test_a_crafted_state_is_unusable_and_nothing_worse(tmp_path: Path, change: Any) -> None:
    file = save(tmp_path, 1, ONE, {}, keep=1) / "state.json"
    if isinstance(change, list):
        file.write_text("[]")
    else:
        reseal(file, lambda body: body.update(change))
    with pytest.raises(UserError, match="no usable checkpoint in"):
        load(tmp_path)


def test_links_among_checkpoints_are_neither_followed_nor_removed_through(tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_steps(other, 1, 2, 3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(other)
    with pytest.raises(CheckpointError, match="it is a link, not a folder"):
        save(tmp_path / "run" / "checkpoints", 9, ONE, {}, keep=1)
    with pytest.raises(UserError, match="it is a link, not a folder"):
        load(tmp_path / "run" / "checkpoints")
    assert steps(other) == [1, 2, 3]
    own = tmp_path / "own"
    save_steps(own, 10, 20)
    (own / "step_00000005").symlink_to(other)
    (own / "step_00000010" / "inner").symlink_to(other)
    assert steps(own) == [5, 10, 20]
    save(own, 30, ONE, {}, keep=1)
    assert steps(own) == [5, 30] and steps(other) == [1, 2, 3]
    (own / "step_00000030" / "tensors.safetensors").unlink()
    (own / "step_00000030" / "tensors.safetensors").symlink_to(
        other / "step_00000001" / "tensors.safetensors"
    )
    with pytest.raises(UserError, match="it is a link, not a file"):
        load(own)


def test_a_choice_of_steps_says_which_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    save(tmp_path, 30, ONE, {}, keep=lambda past: {past[0], past[-1]})
    assert steps(tmp_path) == [10, 30]
    checkpoint.prune(tmp_path, 30, 1)
    assert steps(tmp_path) == [30]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, 40, keep=2)
    assert steps(tmp_path) == [30, 40]
    assert sorted(os.listdir(tmp_path)) == ["step_00000030", "step_00000040"]


def test_saving_after_going_back_removes_the_abandoned_future(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    save(tmp_path, 15, ONE, {}, keep=3)
    assert steps(tmp_path) == [10, 15]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    save(tmp_path, 10, ONE, {"again": True}, keep=1)
    assert load(tmp_path).state == {"again": True}
    assert os.listdir(tmp_path) == ["step_00000010"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep={keep}"):
        save(tmp_path, 1, ONE, {}, keep=keep)


def boxes(
    *places: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...] = (4, 2)
) -> dict[str, File]:
    """A file for each (offsets, sizes) of a tensor w."""
    made = (
        Box(dtype=torch.float32, shape=shape, offsets=at, sizes=sizes, start=0)
        for at, sizes in places
    )
    return {
        str(number): File(status=(0, 0, 0, 0), boxes={"w": [box]})
        for number, box in enumerate(made)
    }


def test_parts_of_a_tensor_tile_it(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path)
    quarters = [((row, column), (2, 1)) for row in (0, 2) for column in (0, 1)]
    for whole in ([((0, 0), (4, 2))], [((0, 0), (2, 2)), ((2, 0), (2, 2))], quarters):
        StoredTensors(folder, boxes(*whole), {})
    StoredTensors(folder, boxes(((0, 0), (0, 2)), ((0, 0), (0, 2)), shape=(0, 2)), {})
    with pytest.raises(ValueError, match="the parts of w have 6 elements of 8"):
        StoredTensors(folder, boxes(*quarters[:3]), {})
    folder.close()


@pytest.mark.parametrize("name", DTYPES)
def test_any_box_of_a_stored_tensor_is_read_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every dtype, against slices of the whole, with reads of a few rows at a time."""
    dtype = DTYPES[name]
    raw = torch.randint(
        0, 2, (5, 4, 6 * dtype.itemsize), generator=torch.Generator().manual_seed(0)
    )
    whole = raw.to(torch.uint8).view(dtype)
    save(tmp_path, 1, {"t": whole, "row": whole[0, 0]}, {}, keep=1)
    set_limit(monkeypatch, "bytes read or written at a time", 2 * whole[0].nbytes)
    stored = load(tmp_path).tensors
    for offsets, sizes in (
        ((0, 0, 0), (5, 4, 6)),
        ((1, 0, 0), (3, 4, 6)),
        ((2, 1, 3), (3, 2, 2)),
        ((4, 3, 5), (1, 1, 1)),
    ):
        expected = whole[
            tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        ].contiguous()
        found = stored.read("t", offsets, sizes)
        assert found.dtype == dtype and torch.equal(
            found.view(torch.uint8), expected.view(torch.uint8)
        )
    assert stored.read("t", (5, 0, 0), (0, 4, 6)).numel() == 0
    with pytest.raises(ValueError, match="1 of 2 elements"):
        stored.read("row", (5,), (2,))


def test_what_two_stages_say_of_one_state_is_joined() -> None:
    one, other = (
        flatten(
            {
                "model": {name: torch.ones(1)},
                "optimizer": {"state": {name: {"lr": math.inf}}, "groups": [{"p": [0, 1]}]},
            }
        )
        for name in ("a", "b")
    )
    joined = merged(one[1], other[1])
    assert isinstance(joined, dict)
    back = unflatten(one[0] | other[0], joined)
    assert set(back["model"]) == {"a", "b"} and back["optimizer"]["state"] == {
        "a": {"lr": math.inf},
        "b": {"lr": math.inf},
    }
    assert merged(joined, joined) == joined and back["optimizer"]["groups"] == [{"p": [0, 1]}]
    with pytest.raises(ValueError, match=r"state/run/step is 1 on one rank and 2 on another"):
        merged({"run": {"step": 1}}, {"run": {"step": 2}})
