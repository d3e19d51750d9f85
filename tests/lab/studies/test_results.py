"""What the commands of studies write is read back; what cannot be a result is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from made import write_ranking, write_run, write_sensitivity

from fp4train.errors import UserError
from fp4train.lab.studies import RankResult, SensitivityResult
from fp4train.lab.studies.stored import bound
from fp4train.sealed import unsealed

DELETED = object()
"""Stands for a key that is taken out."""


def written(path: Path) -> dict[str, Any]:
    return unsealed(path.read_bytes())


def test_a_sensitivity_is_read_as_findings_and_points(tmp_path: Path) -> None:
    found = bound(written(write_sensitivity(write_run(tmp_path / "a"))), SensitivityResult)
    (first, second) = found.of_kind("layer")
    assert (first.what, second.what) == ("blocks.0.mlp.up", "blocks.1.mlp.up")
    assert (first.nmse.mean, first.nmse.error, first.nmse.freedom, first.bias2) == (
        0.08,
        0.01,
        7,
        None,
    )
    assert (
        [point.macs for point in found.pareto] == [0.0, 0.5]
        and found.policy.nmse == 0.02
        and found.gpu is None
    )


@pytest.mark.parametrize("freedom", [0, -1, 9, 10**30, "x"])
def test_an_interval_without_degrees_of_freedom_is_refused(tmp_path: Path, freedom: object) -> None:
    body = written(write_sensitivity(write_run(tmp_path / "a")))
    body["policy"]["measured"]["nmse"]["freedom"] = freedom
    with pytest.raises(UserError, match=r"policy\.measured\.nmse"):
        bound(body, SensitivityResult)


def test_the_interval_of_a_gap_has_the_freedom_of_its_base_runs(tmp_path: Path) -> None:
    one, three = (
        bound(written(write_ranking(write_run(tmp_path / str(len(runs))), runs=runs)), RankResult)
        for runs in (("runs/a",), ("runs/a", "runs/b", "runs/c"))
    )
    for found, freedom in ((one, 5), (three, 2)):
        gap = found.results[1].gap
        assert (
            gap is not None and gap.freedom == freedom and gap.half_width() == pytest.approx(0.0002)
        )
        assert found.results[0].gap is None and found.results[1].simultaneous == (
            0.001,
            0.003,
        )
    assert one.where == "from step 30, rate 0.003 → 0" and three.where == "at each of 3 checkpoints"


def test_a_verdict_that_is_none_is_refused(tmp_path: Path) -> None:
    body = written(write_ranking(write_run(tmp_path / "a")))
    assert [each.verdict for each in bound(body, RankResult).results] == ["reference", "different"]
    body["pairs"][0]["verdict"] = "apart"
    with pytest.raises(
        UserError, match="its verdict 'apart' is none of different, here, alike, open"
    ):
        bound(body, RankResult)


def test_the_interval_with_all_pairs_is_that_of_the_gap_to_the_reference(tmp_path: Path) -> None:
    """A pair names the better candidate first; where that is not the reference, its difference has
    the other sign.
    """
    body = written(write_ranking(write_run(tmp_path / "a")))
    (pair,) = body["pairs"]
    pair["first"], pair["second"] = pair["second"], pair["first"]
    assert bound(body, RankResult).results[1].simultaneous == (-0.003, -0.001)
    pair["together"] = [None, None]
    assert bound(json.loads(json.dumps(body)), RankResult).results[1].simultaneous is None


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("parts", "nothing", "cosine", "mean"), "x", "parts.nothing.cosine.mean='x' must be a"),
        (("parts", "nothing", "loss"), [], "parts.nothing.loss"),
        (("pareto", 1, "time"), 1e200, "1e+200 is no number of a study"),
        (("policy", "keep"), {"a": 1}, "policy.keep"),
        (("step",), None, "step=null must be a whole number"),
        (("policy", "judged", "gain", "count"), DELETED, "policy.judged.gain.count is missing"),
    ],
)
def test_a_value_that_is_none_of_a_study_is_named_by_its_key(
    tmp_path: Path, keys: tuple[Any, ...], value: object, message: str
) -> None:
    body = written(write_sensitivity(write_run(tmp_path / "a")))
    node = body
    for key in keys[:-1]:
        node = node[key]
    if value is DELETED:
        del node[keys[-1]]
    else:
        node[keys[-1]] = value
    with pytest.raises(UserError, match=re.escape(message)):
        bound(body, SensitivityResult)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoints": []}, "it has no checkpoints"),
        ({"order": ["bf16", "fp8"]}, "its order has 'fp8', which is no candidate of it"),
        ({"forks": 1}, "0 degrees of freedom of 1 values"),
    ],
)
def test_a_ranking_that_contradicts_itself_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    body = {**written(write_ranking(write_run(tmp_path / "a"))), **change}
    with pytest.raises(UserError, match=message):
        bound(body, RankResult)
