"""`fp4train compare … margin=`: what runs of one seed, and of several, can and cannot show."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fp4train.cli import main
from fp4train.lab.analysis import compare
from fp4train.lab.gate import WholeRuns, whole_runs
from fp4train.lab.intervals import quantile
from fp4train.track import MetricsLog


def write_run(run: Path, loss: float, recipe: str, seed: int) -> Path:
    run.mkdir(parents=True)
    log = MetricsLog(run / "metrics.jsonl")
    log.log(1, {"train/loss": loss, "precision/recipe": recipe})
    log.log(1, {"val/loss": loss})
    log.finish()
    config = {"run": {"seed": seed, "name": run.name}, "recipe": {"_target_": recipe}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


def runs(folder: Path, losses: dict[str, list[float]]) -> list[Path]:
    return [
        write_run(folder / f"{recipe}{seed}", loss, recipe, seed)
        for recipe, of_recipe in losses.items()
        for seed, loss in enumerate(of_recipe)
    ]


def beside(folder: Path, losses: dict[str, list[float]], margin: float) -> WholeRuns:
    return whole_runs(compare(runs(folder, losses)), margin)


def test_one_seed_each_shows_neither_and_says_how_little_seeds_would_have_to_scatter(
    tmp_path: Path,
) -> None:
    found = beside(tmp_path, {"bf16": [2.0], "mxfp8": [2.004], "nvfp4": [2.05]}, 0.01)
    assert [group.verdict for group in found.groups] == ["undecided", "undecided"]
    assert [group.would_be for group in found.groups] == ["within", "beyond"]
    assert found.groups[0].largest == pytest.approx(0.006 / (1.6449 * math.sqrt(2)))
    text = found.render()
    assert "the scatter from seed to seed is not known" in text
    assert "mxfp80 is +0.0040 from bf160: undecided. One seed each cannot show" in text
    assert "within only if the losses of one recipe scattered by less than 0.0026" in text
    assert "fp4train gate" in text


def test_several_seeds_state_their_deviation_and_an_interval_by_hand(tmp_path: Path) -> None:
    losses = {"bf16": [2.0, 2.002, 2.004], "nvfp4": [2.001, 2.005]}
    found = beside(tmp_path, losses, 0.02)
    squares = 2 * 0.002**2 + 2 * 0.002**2
    deviation = math.sqrt(squares / 3)
    assert found.scatter.deviation == pytest.approx(deviation) and found.scatter.freedom == 3
    (group,) = found.groups
    half = quantile(0.9, 3) * deviation * math.sqrt(1 / 3 + 1 / 2)
    assert group.interval == pytest.approx((0.001 - half, 0.001 + half))
    assert group.verdict == "within"
    assert "seeds scatter by 0.0023 (standard deviation, 3 degrees of freedom" in found.render()
    assert "(2 seeds against 3), 90% interval" in found.render()


@pytest.mark.parametrize(
    ("gap", "verdict"), [(0.0, "within"), (0.05, "undecided"), (0.2, "beyond")]
)
def test_the_verdict_is_where_the_interval_lies(tmp_path: Path, gap: float, verdict: str) -> None:
    seeds = [0.0, 0.01, 0.02, 0.03]
    losses = {"bf16": [2 + x for x in seeds], "nvfp4": [2 + gap + x for x in seeds]}
    assert beside(tmp_path, losses, 0.05).groups[0].verdict == verdict


def test_false_verdicts_of_whole_runs_are_at_most_five_per_cent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seeds each, a true gap of exactly the margin."""
    comparison = compare(runs(tmp_path, {"bf16": [2.0] * 3, "nvfp4": [2.0] * 3}))
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(1500):
        noise = 0.03 * rng.normal(size=6)
        monkeypatch.setattr(comparison, "losses", [*noise[:3], *(noise[3:] + 0.1)])
        verdicts.append(whole_runs(comparison, 0.1).groups[0].verdict)
    for verdict in ("within", "beyond"):
        assert 0.03 < verdicts.count(verdict) / len(verdicts) < 0.07


def run_cli(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_it_and_writes_it(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(working_folder, {"bf16": [2.0], "nvfp4": [2.05, 2.06]})
    names = ["bf160", "nvfp40", "nvfp41"]
    assert run_cli("compare", *names, "margin=0.01", "out=gaps.json") == 0
    assert "margin ±0.01 nats per token" in capsys.readouterr().out
    saved: dict[str, Any] = json.loads(Path("gaps.json").read_text())
    assert saved["margin"]["groups"][0]["gap"] == pytest.approx(0.055)
    for margin in ("0", "-1", "nan", "inf", "much"):
        assert run_cli("compare", *names, f"margin={margin}") == 1
        message = f"margin='?{margin}'? must be (a number|finite)"
        assert re.search(message, capsys.readouterr().err)
    assert run_cli("compare", "bf160", "margin=0.01", "out=a.png") == 1
    assert "name two or more" in capsys.readouterr().err


def test_a_loss_that_is_no_number_shows_nothing(tmp_path: Path) -> None:
    found = beside(tmp_path, {"bf16": [2.0], "nvfp4": [math.nan]}, 0.01)
    assert "it shows nothing" in found.render()
