"""What the commands of studies write is read back; what cannot be a result is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from made import write_ranking, write_run, write_sensitivity

from fp4train.errors import UserError
from fp4train.lab.studies import RankResult, SensitivityResult
from fp4train.lab.studies.results import bound
from fp4train.sealed import unsealed

DELETED = object()
"""Stands for a key that is taken out."""


def written(path: Path) -> dict[str, Any]:
    return unsealed(path.read_bytes())


def test_keys_of_another_version_are_left_out(tmp_path: Path) -> None:
    body = written(write_sensitivity(write_run(tmp_path / "a")))
    body["parts"]["nothing"]["nmse"]["interval"] = [0.0, 1.0]
    study = bound({**body, "later": 1}, SensitivityResult)
    assert [part.what for part in study.of_kind("layer")] == ["blocks.0.mlp.up", "blocks.1.mlp.up"]
    assert study.floor == pytest.approx(0.001)
    assert (study.policy.macs, study.policy.keep) == (0.5, ("blocks.0.mlp.up",))
    assert study.gain == study.parts["everything"].nmse and study.gain.freedom == 2


@pytest.mark.parametrize("freedom", [0, -1, 9, 10**30, "x"])
def test_an_interval_without_degrees_of_freedom_is_refused(tmp_path: Path, freedom: object) -> None:
    body = written(write_sensitivity(write_run(tmp_path / "a")))
    body["policy"]["measured"]["nmse"]["freedom"] = freedom
    with pytest.raises(UserError, match=r"policy\.measured\.nmse"):
        bound(body, SensitivityResult)


@pytest.mark.parametrize(
    ("runs", "where"),
    [
        (("runs/a",), "from step 30, rate 0.003 → 0"),
        (("runs/a", "runs/b"), "at each of 2 checkpoints"),
    ],
)
def test_a_ranking_says_where_its_forks_begin(
    tmp_path: Path, runs: tuple[str, ...], where: str
) -> None:
    study = bound(written(write_ranking(write_run(tmp_path / "a"), runs=runs)), RankResult)
    assert (study.where, study.steps) == (where, 24)


@pytest.mark.parametrize(
    ("write", "keys", "value", "message"),
    [
        (write_sensitivity, ("parts", "nothing"), DELETED, "its parts lack 'nothing'"),
        (write_sensitivity, ("parts", "nothing", "loss"), [], "parts.nothing.loss"),
        (write_sensitivity, ("policy", "keep"), {"a": 1}, "policy.keep"),
        (write_sensitivity, ("step",), None, "step=null must be a whole number"),
        (
            write_sensitivity,
            ("policy", "judged", "gain", "count"),
            DELETED,
            "policy.judged.gain.count is missing",
        ),
        (write_ranking, ("checkpoints",), [], "it has no checkpoints"),
        (
            write_ranking,
            ("candidates", 1, "verdict"),
            "apart",
            "verdict='apart' must be one of different, here, alike, open",
        ),
    ],
)
def test_a_value_that_is_none_of_a_study_is_named_by_its_key(
    tmp_path: Path, write: Any, keys: tuple[Any, ...], value: object, message: str
) -> None:
    body = written(write(write_run(tmp_path / "a")))
    node = body
    for key in keys[:-1]:
        node = node[key]
    if value is DELETED:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    with pytest.raises(UserError, match=re.escape(message)):
        bound(body, SensitivityResult if write is write_sensitivity else RankResult)
