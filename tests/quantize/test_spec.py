"""Impossible specs are refused, and the message names field, value and what is allowed."""

import copy
import dataclasses
import pickle
import re

import pytest
import torch

from fp4train.formats import E4M3
from fp4train.quantize import Delayed, Hadamard, QuantSpec, RandomKey, Rotation

MX = {"block": (1, 32), "scale": "e8m0", "global_scale": None}
FP8 = {"element": "e4m3", "block": (None, None), "scale": "fp32", "global_scale": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"element": "e3m4"}, "element format 'e3m4' is unknown; did you mean"),
        ({"element": None}, "element format None is unknown"),
        ({"block": (1,)}, "block=(1,): allowed is a pair"),
        ({"block": (0, 16)}, "block=(0, 16): rows and cols must be integers >= 1"),
        ({"block": (1, 16.0)}, "block=(1, 16.0): rows and cols must be integers"),
        ({"block": (1, 15)}, "block=(1, 15): e2m1 packs two codes per byte"),
        ({"block": (None, 16)}, "block=(None, 16): blocks run along the last axis"),
        ({**FP8, "block": (4, None)}, "block=(4, None): whole rows are (1, None)"),
        ({"block": (1, None)}, "block=(1, None): scale='e4m3' is a block scale"),
        (
            {"scale": "e5m2"},
            "scale='e5m2' is not one of e4m3, e8m0, ue5m3, ue5m3_ieee, fp32, pow2, "
            "hif4, if4; did you mean 'ue5m3'?",
        ),
        ({"scale": "e8m0"}, "global_scale='tensor': scale='e8m0' spans the whole range; use None"),
        ({**FP8, "global_scale": "row"}, "global_scale='row': scale='fp32' spans the whole range"),
        ({"global_scale": None}, "global_scale=None: scale='e4m3'"),
        (
            {"global_scale": "column"},
            "global_scale='column' is not one of None, tensor, row, block",
        ),
        (
            {"block": (16, 16), "global_scale": "row"},
            "global_scale='row': block=(16, 16) spans rows",
        ),
        (
            {"block": (16, 16), "global_scale": "row", "rounding": "stochastic"},
            "global_scale='row'",
        ),
        ({"global_bound": 449.0}, "allowed are numbers from 1 to 448"),
        ({**MX, "global_bound": 256.0}, "global_bound=256.0: only scale='e4m3' or "),
        ({"scale_rounding": "floor"}, "scale_rounding='floor': only scale='e8m0' has one"),
        (
            {**MX, "scale_rounding": "up"},
            "scale_rounding='up' is not one of rceil, floor, even, ceil",
        ),
        ({"formula": "te3"}, "formula='te3' is not one of te2.14, te2.13"),
        ({"rounding": "up"}, "rounding='up' is not one of nearest, stochastic"),
        ({"four_over_six": "max"}, "four_over_six='max' is not one of None, mae, mse"),
        (
            {"four_over_six": "mse", "rounding": "stochastic"},
            "four_over_six='mse': choosing by error biases",
        ),
        (
            {**MX, "four_over_six": "mse"},
            "four_over_six='mse': needs element='e2m1' and scale='e4m3'",
        ),
        ({"four_over_six": "mae", "guard": 0.9}, "guard=0.9: four_over_six sets its own range"),
        ({"guard": 1.5}, "guard=1.5: allowed are numbers above 0.5 up to 1.0"),
        ({**MX, "guard": 0.9}, "guard=0.9: scale_rounding='rceil' never clips; use 1.0, or"),
        ({**FP8, "guard": 0.9}, "guard=0.9: only scale='e4m3'"),
        ({"delayed": Delayed()}, "needs block=(None, None)"),
        (
            {**FP8, "block": (None, None), "delayed": Delayed(), "hadamard": Hadamard()},
            "the amaxes of a history are those of the tensor as it is",
        ),
        (
            {**FP8, "block": (None, None), "delayed": Delayed(), "requantises": QuantSpec()},
            "the amaxes of a history are those of the tensor as it is",
        ),
        ({"scale": "ue5m3", "global_bound": 114689}, "allowed are numbers from 1 to 114688"),
        ({"scale": "ue5m3_ieee", "global_bound": 61441}, "allowed are numbers from 1 to 61440"),
        (
            {"scale": "ue5m3", "global_scale": None, "global_bound": 256},
            "under a global_scale has one; leave 448",
        ),
        ({"scale": "ue5m3", "four_over_six": "mse"}, "needs element='e2m1' and scale='e4m3'"),
        ({"scale": "if4", "global_scale": None}, "binades only and needs 'tensor' or 'row'"),
        (
            {"scale": "ue5m3", "global_scale": None, "block": (1, None)},
            "scale='ue5m3' is a block scale",
        ),
    ],
)
def test_an_impossible_spec_names_the_field(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QuantSpec(**fields)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (Hadamard, {"size": 48}, "size=48: a Hadamard transform allows 2, 4, 8, 16, 32, 64, 128"),
        (
            Hadamard,
            {"signs": "maybe"},
            "signs='maybe': a Hadamard transform allows fixed, none, random",
        ),
        (Hadamard, {"seed": 3}, "seed=3: only signs='random' draws from a seed"),
        (Hadamard, {"signs": "random", "seed": -1}, "seed=-1"),
        (Rotation, {"kind": "fft"}, "kind='fft': a rotation allows dct, orthogonal"),
        (Rotation, {"size": 1}, "size=1: a rotation allows integers from 2 to 1024"),
        (Rotation, {"seed": -1}, "seed=-1"),
        (Delayed, {"history": 0}, "history=0: delayed scaling allows integers from 1 to 1,048,576"),
        (
            Delayed,
            {"history": 10**11},
            "history=100000000000: delayed scaling allows integers from 1 to 1,048,576",
        ),
        (Delayed, {"algorithm": "mean"}, "algorithm='mean' is not one of max, most_recent"),
        (Delayed, {"margin": 0.5}, "margin=0.5"),
        (
            RandomKey,
            {"seed": 1 << 64, "step": 0, "layer": 0, "operand": 0},
            "seed=18446744073709551616",
        ),
        (RandomKey, {"seed": 0, "step": 1 << 29, "layer": 0, "operand": 0}, "step=536870912"),
        (RandomKey, {"seed": 0, "step": 0, "layer": -1, "operand": 0}, "layer=-1"),
        (
            RandomKey,
            {"seed": 0, "step": 0, "layer": 0, "operand": 8},
            "operand=8: RandomKey allows integers 0",
        ),
        (
            RandomKey,
            {"seed": 0, "step": 0, "layer": 0, "operand": 0, "col_offset": 4},
            "col_offset=4: must be",
        ),
    ],
)
def test_impossible_parts_name_the_field(cls: type, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cls(**fields)


def test_specs_are_frozen_hashable_and_compare_by_value() -> None:
    assert QuantSpec(block=[1, 32], scale="e8m0", global_scale=None) == QuantSpec(
        **MX, scale_rounding="rceil"
    )
    assert len({QuantSpec(), QuantSpec(), QuantSpec(hadamard=Hadamard())}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantSpec().element = "e4m3"


def test_keys_are_frozen_compare_by_value_and_survive_pickling_and_replacing() -> None:
    key = RandomKey(seed=1, step=2, layer=3, operand=4)
    assert key == pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) != key.replace(row_offset=1)
    assert pickle.loads(pickle.dumps(key)).words == key.words != key.replace(row_offset=1).words
    assert len({key, copy.copy(key)}) == 1 and key != tuple(key)
    counters = [torch.zeros(8, dtype=torch.int32) for _ in range(2)]
    counted = [
        RandomKey(seed=1, step=2, layer=3, operand=4, counters=tensor) for tensor in counters
    ]
    assert counted[0] == counted[1] == key and (counted[0] != counted[1]) is False
    with pytest.raises(AttributeError):
        key.step = 5
    for value in (1.0, "1", None, torch.tensor(1.0)):
        with pytest.raises(ValueError, match="step="):
            key.replace(step=value)


def test_a_spec_from_another_process_has_this_ones_hash_and_formats() -> None:
    """Hashes of strings differ between processes."""
    spec = QuantSpec(element="e4m3")
    assert hash(spec) and spec.format is E4M3 and spec.scale_format.name == "e4m3"
    copied = pickle.loads(pickle.dumps(spec))
    assert not {"_hash", "scale_format"} & set(vars(copied))
    assert copied == spec and copied.format == E4M3 and hash(copied) == hash(spec)
