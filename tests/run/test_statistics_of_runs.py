"""Measured steps: they change nothing, outlive a resume, and say when the gradient is lost in
noise.
"""

from pathlib import Path

import numpy as np
import pytest
from command_line import Cli, events, lines
from limits import set_limit

from fp4train.track import STATISTICS, read_statistics

SMALL = ("recipe=nvfp4", "policy=all", "phases=none", "eval.errors_every=2")


def test_a_resumed_run_has_the_statistics_of_an_uninterrupted_one(cli: Cli) -> None:
    cli.trained("run.name=whole", *SMALL)
    whole = read_statistics(Path("runs/whole"))
    assert sorted(set(whole.operands["step"])) == [2, 4, 6]
    assert len(whole.operands["step"]) == 3 * 6 * len(set(whole.operands["layer"]))
    assert cli("run.name=stopped", *SMALL, "checkpoint.every=3").code == 0
    before = (Path("runs/stopped") / STATISTICS).read_bytes()
    stopped = read_statistics(Path("runs/stopped"))
    for one, other in ((whole.operands, stopped.operands), (whole.gradients, stopped.gradients)):
        assert all(
            np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f")
            for name in one
        )
    assert cli("resume=runs/stopped", "resume_step=3").code == 0
    assert (Path("runs/stopped") / STATISTICS).read_bytes() == before


def test_a_line_of_metrics_has_the_summary_of_the_statistics_and_no_more(cli: Cli) -> None:
    cli.trained("run.name=whole", *SMALL)
    found = read_statistics(Path("runs/whole"))
    measured = {line["step"]: line for line in lines("runs/whole") if "error/sqnr_db" in line}
    assert sorted(measured) == [2, 4, 6]
    assert all(sum(key.startswith("error/") for key in line) == 9 for line in measured.values())
    at = found.operands["step"] == 4
    assert measured[4]["error/sqnr_db"] == pytest.approx(np.median(found.operands["sqnr_db"][at]))
    layer, operand = measured[4]["error/worst"].split()
    worst = found.operands["sqnr_db"][at].argmin()
    assert (layer, operand) == (
        found.operands["layer"][at][worst],
        found.operands["operand"][at][worst],
    )
    of = found.gradients["step"] == 4
    norm, noise = (np.linalg.norm(found.gradients[key][of]) for key in ("gradient", "noise"))
    assert measured[4]["error/gradient_to_noise"] == pytest.approx(norm / noise, rel=1e-5)
    assert 0 < norm <= measured[4]["train/grad_norm"] * (1 + 1e-6), "a part of the whole gradient"


@pytest.mark.parametrize("recipe", ["nvfp4", "fp16"])
def test_a_gradient_below_the_threshold_is_told_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    set_limit(monkeypatch, "least ratio of gradient to noise", 1e9)
    ended = cli("run.name=a", *SMALL[1:], f"recipe={recipe}")
    assert ended.code == 0
    told = events("runs/a", "weak gradient")
    assert len(told) == (recipe == "nvfp4"), "where nothing is quantised there is no noise"
    assert ended.err.count("consider a cooldown in higher precision") == len(told)
    if told:
        assert told[0]["step"] == 2 and told[0]["gradient_to_noise"] > 0
    assert (Path("runs/a") / STATISTICS).exists() == (recipe == "nvfp4")


def test_the_default_run_is_far_from_the_threshold(cli: Cli) -> None:
    cli.trained("run.name=whole", *SMALL)
    assert all(
        line["error/gradient_to_noise"] > 5 for line in lines("runs/whole") if "error/noise" in line
    )
    assert not events("runs/whole", "weak gradient")
