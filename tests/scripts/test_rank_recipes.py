"""scripts/rank_recipes.py: outlier channels change no function, and a ranking becomes a table."""

import importlib.util
import json
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
import torch
from command_line import TINY
from configured import recipe_named

from fp4train.cli import main
from fp4train.lab.ledger import ledger
from fp4train.lab.studies import open_checkpoint
from fp4train.precision import FP32, Timeline
from fp4train.run.build import build_plan
from fp4train.run.evaluate import microbatch_losses

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "rank_recipes", ROOT / "scripts" / "rank_recipes.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their types
    spec.loader.exec_module(module)
    monkeypatch.undo()
    return module


def test_outlier_channels_change_activations_and_not_the_function(
    script: ModuleType, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over a lazy dog " * 400)
    run = tmp_path / "a"
    data = (f"data.path={text}", f"data.cache_dir={tmp_path / 'cache'}")
    with pytest.raises(SystemExit) as ended:
        main([*TINY, *data, f"run.dir={run}", "checkpoint.every=3"])
    assert ended.value.code == 0
    script.put_outliers_in(run, 3, tmp_path / "b")
    losses = []
    largest = []
    for folder in (run, tmp_path / "b"):
        subject = open_checkpoint(folder, 3)
        seen: list[torch.Tensor] = []
        layer = subject.run.model.get_submodule("blocks.0.mlp.up")
        layer.register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(inputs[0].abs().amax())
        )
        own = subject.run
        in_float32 = build_plan(
            own.config, own.layers, Timeline(recipe=FP32(), steps=1), own.plan.device
        )
        losses.append(fmean(microbatch_losses(own, in_float32.stretches[0])[0]))
        largest.append(float(seen[0]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert largest[1] > 4 * largest[0]


def test_a_ranking_becomes_a_table(script: ModuleType) -> None:
    gap = {"mean": 0.0044, "low": 0.0035, "high": 0.0053, "error": 0.0004, "t": 11.0}
    entry = {
        "same": [],
        "diverged": [],
        "gap": gap,
        "gap_high": gap,
        "gaps": [0.004, 0.0048],
        "tokens": 0.0006,
    }
    zero = {"mean": 0.0, "low": 0.0, "high": 0.0, "error": 0.0, "t": 0.0}
    ranking = {
        "checkpoints": [{"run": f"runs/{name}", "trained": "NVFP4"} for name in "ab"],
        "forks": 3,
        "look": 1,
        "recorded": 3,
        "reference": "bf16",
        "floor": zero,
        "order": ["bf16", "nvfp4"],
        "pairs": [{"first": "bf16", "second": "nvfp4", "p": 0.02, "verdict": "here"}],
        "candidates": [
            {**entry, "name": "bf16", "group": "a", "gap": zero, "gap_high": zero, "spikes": []},
            {**entry, "name": "nvfp4", "group": "b", "spikes": ["runs/b, step 200, seed 1"]},
            {
                "name": "mxfp4",
                "same": [],
                "group": None,
                "diverged": ["step 3: loss is nan"],
                "spikes": [],
            },
        ],
    }
    text = script.section(script.CASES[0], json.loads(json.dumps(ranking)))
    row = (
        "| nvfp4 | +0.00440 ± 0.00090 | 0.00060 | +0.00440 ± 0.00090 | +0.0040 +0.0048 | 0.02 "
        "| told apart here | b |"
    )
    assert row in text
    assert "3 forks at each of 2 checkpoints: a (trained in NVFP4), b (trained in NVFP4)." in text
    assert "nvfp4 spikes at runs/b, step 200, seed 1." in text
    assert "| mxfp4 | diverged: step 3: loss is nan | | | | | | |" in text


def test_a_case_that_is_ranked_again_replaces_its_section_and_no_other_text(
    script: ModuleType,
) -> None:
    text = "# Title\n\nWords.\n\n## early: old\n\n| a |\n\n## policies: kept\n\n| b |\n"
    again = script.with_section(text, "## early: new\n\n| c |")
    assert again == "# Title\n\nWords.\n\n## early: new\n\n| c |\n\n## policies: kept\n\n| b |\n"
    assert script.with_section(again, "## English: first") == again + "\n## English: first\n"
    assert script.with_section("# Title\n", "## early: new") == "# Title\n\n## early: new\n"


def test_all_cases_of_a_record_are_measured_before_its_first_look(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forks of one checkpoint are too few for a look; those of all checkpoints together take
    one.
    """
    commands: list[tuple[str, ...]] = []

    def fp4train(*words: str) -> str:
        commands.append(words)
        return f"{tmp_path / 'rank.json'}; rank.png\n"

    (tmp_path / "rank.json").write_text("{}")
    monkeypatch.setattr(script, "fp4train", fp4train)
    monkeypatch.setattr(script, "prepare", lambda case, seed, runs: Path(f"run{seed}"))
    monkeypatch.setattr(script, "section", lambda case, found: f"## {case.name}: \n")
    out = ["--out", str(tmp_path / "a.md")]
    monkeypatch.setattr(
        sys, "argv", ["rank_recipes.py", "--cases", "early", "policies", *out, "--bases", "3"]
    )
    script.main()
    runs = [sum(word.startswith("run") for word in words) for words in commands]
    assert runs == [1] * 6 + [3] * 2 and {"policy=all,last15,first15"} <= set(commands[-1])


def test_one_command_ranks_the_whole_ledger_in_the_cases_that_it_names(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []

    def fp4train(*words: str) -> str:
        commands.append(words)
        return f"{tmp_path / 'rank.json'}; rank.png\n"

    (tmp_path / "rank.json").write_text("{}")
    monkeypatch.setattr(script, "fp4train", fp4train)
    monkeypatch.setattr(script, "prepare", lambda case, seed, runs: Path(f"run{seed}"))
    monkeypatch.setattr(script, "section", lambda case, found: f"## {case.name}: \n")
    cases = ["--cases", "early", "annealed", "outliers"]
    monkeypatch.setattr(
        sys, "argv", ["rank_recipes.py", *cases, "--ledger", "--out", str(tmp_path / "a.md")]
    )
    script.main()
    recipes = {word for words in commands for word in words if word.startswith("recipe=")}
    names = recipes.pop().removeprefix("recipe=").split(",")
    assert not recipes and names[:2] == ["bf16", "mxfp8"]
    ranked = {entry.recipe for entry in ledger()} - set(script.LEFT_OUT)
    assert set(names[2:]) == ranked and len(names) == len(set(names))
    runs = [sum(word.startswith("run") for word in words) for words in commands]
    assert runs == [1] * 11 + [4, 4, 3]
    text = (tmp_path / "a.md").read_text()
    assert all(f"{name} is left out: {reason}" in text for name, reason in script.LEFT_OUT.items())
    assert "--ledger" in text and "`oscillation.every`, are left out" in text


@pytest.mark.long
def test_a_recipe_is_left_out_where_no_fork_comes_to_what_tells_it_from_another(
    script: ModuleType,
) -> None:
    end = max(case.step for case in script.CASES) + int(script.FORKS["steps"])
    for name in dict.fromkeys(entry.recipe for entry in ledger()):
        channels = recipe_named(name).outliers
        late = channels is not None and channels.start + channels.steps > end
        assert late == (name in script.LEFT_OUT)
