"""The page of a report says what the runs are, how they compare, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made import LAYERS, write_ranking, write_run, write_sensitivity
from omegaconf import OmegaConf
from report_page import links, report

from fp4train.sealed import sealed, unsealed
from fp4train.track import STATISTICS, MetricsLog


def test_the_page_has_every_part_and_asks_for_nothing(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", seed=0, errors=True)
    write_ranking(a)
    write_sensitivity(a)
    b = write_run(tmp_path / "b", 3.03, seed=0, settings={"batch_size": 8})
    page = report(tmp_path, a, b)
    for word in (
        "Results",
        "Curves",
        "Ranking",
        "Sensitivity",
        "Quantisation errors",
        "Configuration",
        "Environment",
    ):
        assert f"{word}" in page.text
    assert "+1.00%" in page.text, "3.03 is 1 % above 3.00"
    assert "told apart" in page.text and "+0.00200 ± 0.00025" in page.text
    assert f"Policy: keep {LAYERS[0]}, 50.0%" in page.text and "train.batch_size" in page.text
    assert "E2M1·E2M1 50.0%, BF16·BF16 50.0%" in page.text and "ran to 40" in page.text, (
        "ten steps are planned"
    )
    pictures = [attributes for tag, attributes in page.found if tag == "img"]
    assert [bool(picture["alt"]) for picture in pictures] == [True] * 4
    assert "2.13.0" in page.text and "20.5 k" in page.text, "the version of torch, 40 · 512 tokens"
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in links(page))
    targets = {attributes.get("id") for _, attributes in page.found}
    assert {link[1:] for link in links(page) if link.startswith("#")} <= targets, (
        "no link within the page is dead"
    )


@pytest.mark.usefixtures("sketched")
def test_a_ranking_of_several_runs_is_shown_once_with_its_checkpoints(
    tmp_path: Path,
) -> None:
    runs = [write_run(tmp_path / name, seed=0) for name in "ab"]
    for run in runs:
        write_ranking(run, runs=("runs/a", "runs/b"))
    page = report(tmp_path, *runs)
    assert page.text.count("2 checkpoints: 6 forks of 24 steps for each candidate at each") == 1
    assert "runs/a, step 30, trained in NVFP4; runs/b, step 30, trained in NVFP4" in page.text
    alone = report(tmp_path, write_ranking(write_run(tmp_path / "c", seed=0)).parents[2])
    assert "One checkpoint: all of this holds for it alone." in alone.text


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    ("write", "key"), [(write_ranking, "checkpoints"), (write_sensitivity, "pareto")]
)
def test_a_result_of_an_older_form_says_what_to_do(
    tmp_path: Path, write: Callable[[Path], Path], key: str
) -> None:
    run = write_run(tmp_path / "a", seed=0)
    path = write(run)
    body = unsealed(path.read_bytes())
    del body[key]
    path.write_bytes(sealed(body))
    said = (
        f"cannot be read (it has no '{key}'): another version of fp4train wrote it, or it was "
        "changed; the same command writes"
    )
    assert said in report(tmp_path, run).text


@pytest.mark.usefixtures("sketched")
def test_a_key_that_one_run_does_not_have_is_no_null_of_it(tmp_path: Path) -> None:
    """A field of NVFP4 in a run of BF16: it is listed for the runs that have it."""
    a = write_run(tmp_path / "a", seed=0, settings={"hadamard": True, "depth": 4})
    b = write_run(tmp_path / "b", 3.03, seed=0, settings={"depth": 8})
    text = (
        report(tmp_path, a, b)
        .text.partition("The 2 keys that differ")[2]
        .partition("Environment")[0]
    )
    assert "train.hadamardtrue 1" in text and "train.depth4 18 2" in text and "null" not in text


@pytest.mark.usefixtures("sketched")
def test_a_run_without_statistics_has_no_errors(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert "None of the runs measured them" in report(tmp_path, run).text
    (run / STATISTICS).write_bytes(b"torn")
    assert "None of the runs measured them" in report(tmp_path, run).text


@pytest.mark.usefixtures("sketched")
def test_a_gradient_below_its_threshold_and_faults_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    log = MetricsLog(run / "metrics.jsonl")
    for step, ratio in ((50, 1.8), (60, 1.7), (70, 1.6)):
        log.log(step, {"error/gradient_to_noise": ratio})
    log.log_event(22, "audit", {"layer": LAYERS[1], "gemms": ["fprop"], "faults": 0})
    log.log_event(22, "audit fault", {"layer": LAYERS[0], "what": "other codes", "more": 2})
    log.finish()
    text = report(tmp_path, run, write_run(tmp_path / "b")).text
    assert "at step 60 the gradient's norm was 1.70 times its quantisation noise" in text
    assert "2 of 3 measured" in text
    assert f"layer: {LAYERS[0]}, what: other codes, more: 2" in text
    assert f"layer: {LAYERS[1]}" not in text, "an audit is routine"


@pytest.mark.usefixtures("sketched")
def test_runs_of_different_data_are_told(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", seed=0)
    b = write_run(tmp_path / "b", seed=0, data="other")
    assert "trained on different data" in report(tmp_path, a, b).text
    c = write_run(tmp_path / "c", seed=0, settings={"seq_len": 256})
    assert "differ in train.seq_len" in report(tmp_path, a, c).text
    assert "different data" not in report(tmp_path, a, write_run(tmp_path / "d", seed=1)).text


@pytest.mark.usefixtures("sketched")
def test_another_cache_of_the_data_is_no_other_data(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / name, seed=0) for name in "ab")
    for run, folder in ((a, "x"), (b, "y")):
        data = {"path": "text", "cache_dir": folder}
        body = {"run": {"seed": 0}, "data": data}
        (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(body)))
    text = report(tmp_path, a, b).text
    assert "losses may not compare" not in text and "The runs have the same configuration" in text


def test_runs_without_a_common_step_have_no_gap(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", steps=5)
    b = write_run(tmp_path / "b", steps=5, first=101)
    assert "share no step with a loss" in report(tmp_path, a, b).text
