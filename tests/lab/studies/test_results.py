"""What the commands of studies write is read back; what cannot be a result is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made import write_ranking, write_run, write_sensitivity

from fp4train.lab.studies.results import RankResult, SensitivityResult
from fp4train.sealed import unsealed


def written(path: Path) -> dict[str, Any]:
    return unsealed(path.read_bytes())


def test_a_sensitivity_is_read_as_findings_and_points(tmp_path: Path) -> None:
    found = SensitivityResult(written(write_sensitivity(write_run(tmp_path / "a"))))
    (first, second) = found.of_kind("layer")
    assert (first.what, second.what) == ("blocks.0.mlp.up", "blocks.1.mlp.up")
    assert (first.nmse.mean, first.nmse.error, first.nmse.freedom, first.bias2) == (
        0.08,
        0.01,
        7,
        None,
    )
    assert (
        [point.macs for point in found.curve] == [0.0, 0.5]
        and found.chosen.nmse == 0.02
        and found.gpu is None
    )


@pytest.mark.parametrize("freedom", [0, -1, 9, 10**30, "x"])
def test_an_interval_without_degrees_of_freedom_is_refused(tmp_path: Path, freedom: object) -> None:
    body = written(write_sensitivity(write_run(tmp_path / "a")))
    body["policy"]["measured"]["nmse"]["freedom"] = freedom
    with pytest.raises((ValueError, TypeError)):
        SensitivityResult(body)


def test_the_interval_of_a_gap_has_the_freedom_of_its_base_runs(tmp_path: Path) -> None:
    one, three = (
        RankResult(written(write_ranking(write_run(tmp_path / str(len(runs))), runs=runs)))
        for runs in (("runs/a",), ("runs/a", "runs/b", "runs/c"))
    )
    for found, freedom in ((one, 5), (three, 2)):
        gap = found.candidates[1].gap
        assert (
            gap is not None and gap.freedom == freedom and gap.half_width() == pytest.approx(0.0002)
        )
        assert found.candidates[0].gap is None and found.candidates[1].simultaneous == (
            0.001,
            0.003,
        )
    assert one.where == "from step 30, rate 0.003 → 0" and three.where == "at each of 3 checkpoints"


def test_a_verdict_that_is_none_is_refused(tmp_path: Path) -> None:
    body = written(write_ranking(write_run(tmp_path / "a")))
    assert [each.verdict for each in RankResult(body).candidates] == ["reference", "different"]
    body["pairs"][0]["verdict"] = "apart"
    with pytest.raises(
        ValueError, match="its verdict 'apart' is none of different, here, alike, open"
    ):
        RankResult(body)


def test_the_interval_with_all_pairs_is_that_of_the_gap_to_the_reference(tmp_path: Path) -> None:
    """A pair names the better candidate first; where that is not the reference, its difference has
    the other sign.
    """
    body = written(write_ranking(write_run(tmp_path / "a")))
    (pair,) = body["pairs"]
    pair["first"], pair["second"] = pair["second"], pair["first"]
    assert RankResult(body).candidates[1].simultaneous == (-0.003, -0.001)
    pair["together"] = [None, None]
    assert RankResult(json.loads(json.dumps(body))).candidates[1].simultaneous is None
