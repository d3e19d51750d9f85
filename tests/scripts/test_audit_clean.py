"""scripts/audit_clean.py: 400 runs have everything that runs here, and a later call goes on."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp4train.audit import in_turn
from fp4train.cli import main

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("audit_clean")


def line_of(clean: Any, **changes: Any) -> str:
    result = {
        "audits": 6,
        "layers": ["blocks.0.mlp.up"],
        "uncovered": {},
        "faults": [],
        "failed": [],
        "code": 0,
        "seconds": 3.0,
        "commit": "abc",
        "printed": "",
    }
    row = {"run": asdict(clean), "options": clean.options, **result, **changes}
    return json.dumps(row) + "\n"


def result_of(clean: Any) -> dict[str, Any]:
    row = json.loads(line_of(clean))
    return {key: value for key, value in row.items() if key not in ("run", "options")}


def test_400_runs_have_all_recipes_backends_and_models_on_one_rank_and_on_two(
    script: ModuleType,
) -> None:
    ways: dict[str, set[tuple[str, str, int]]] = {}
    meshes = set()
    for clean in script.planned_runs(400):
        ways.setdefault(clean.recipe, set()).add((clean.backend, clean.model, clean.ranks))
        meshes.add(clean.mesh)
    assert sorted(ways) == script.RECIPES
    assert meshes == set(script.MESHES)
    for recipe, of_recipe in ways.items():
        backends = {"emulate", "reference"} | ({"native"} if recipe in script.NATIVE else set())
        assert {backend for backend, _, _ in of_recipe} == backends
        assert {(model, ranks) for _, model, ranks in of_recipe} == {
            ("dense", 1),
            ("dense", 2),
            ("experts", 1),
            ("experts", 2),
        }


def test_layers_are_cut_over_ranks_in_every_recipe_that_allows_it(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = {clean.recipe for clean in script.planned_runs(400) if "parallel.tp=2" in clean.options}
    assert cut == set(script.RECIPES) - set(script.UNCUT)
    for recipe in script.UNCUT:
        words = (f"recipe={recipe}", "policy=all", *script.TENSOR, "gpu=B200", "gpus=2")
        with pytest.raises(SystemExit) as refused:
            main(["plan", *words])
        assert refused.value.code == 1
        assert "parallel.tp cuts blocks.0.attention.wq" in capsys.readouterr().err, recipe


def test_amaxes_of_all_tokens_are_joined_in_every_recipe(script: ModuleType) -> None:
    joined = [clean for clean in script.planned_runs(400) if "parallel.amax=data" in clean.options]
    assert sorted(clean.recipe for clean in joined) == script.RECIPES
    assert {clean.model for clean in joined} == {"dense"}  # experts refuse it


def test_the_page_says_how_many_runs_each_commit_made(script: ModuleType, tmp_path: Path) -> None:
    record, page = tmp_path / "record.jsonl", tmp_path / "page.md"
    first, second, third = script.planned_runs(3)
    record.write_text(line_of(first) + line_of(second) + line_of(third, commit="def"))
    assert script.script(["3", "--record", str(record), "--page", str(page)]) == 0
    assert page.read_text().endswith("code of abc (2 runs) and def (1 run).\n")


def test_a_page_that_is_written_again_keeps_the_notes_of_its_readers(
    script: ModuleType, tmp_path: Path
) -> None:
    record, page = tmp_path / "record.jsonl", tmp_path / "page.md"
    (clean,) = script.planned_runs(1)
    record.write_text(line_of(clean))
    words = ["1", "--record", str(record), "--page", str(page)]
    script.script(words)
    with page.open("a") as file:
        file.write("\n## Notes\n\nThe first run was made twice.\n")
    script.script(words)
    told = page.read_text()
    assert told.startswith("# Audited runs") and told.count("code of abc") == 1
    assert told.endswith("\n\n## Notes\n\nThe first run was made twice.\n")


def test_later_runs_are_made_without_the_first_ones(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count_runs(script, monkeypatch)
    paths = ["--record", str(tmp_path / "record.jsonl"), "--page", str(tmp_path / "page.md")]
    assert script.script(["2", "--first", "300", *paths]) == 0
    assert numbers == [300, 301]
    page = (tmp_path / "page.md").read_text()
    assert "| emulate | dense: one block, policy=all | 2, tensor | 1 | 6 | 0 | 0 | 0 |" in page
    assert "`python scripts/audit_clean.py 2 --first 300`" in page


def test_the_runs_of_each_recipe_audit_every_layer_of_each_model(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models: dict[str, set[tuple[str, str]]] = {}
    for clean in script.planned_runs(400):
        models.setdefault(clean.recipe, set()).add((clean.model, clean.blocks))
    assert all(of_recipe == set(script.MODELS) for of_recipe in models.values())

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    for options in script.MODELS.values():
        with pytest.raises(SystemExit):
            main(["plan", *script.SMALL, *options, "data.path=text.txt", "--json"])
        told = json.loads(capsys.readouterr().out)
        names = dict.fromkeys(gemm["layer"] for gemm in told["gemms"])
        layers = [name for name in names if name.startswith("blocks.")]  # not the tied head
        turn = in_turn(layers, layers[-1])
        steps = max(gemm["steps"][1] for gemm in told["gemms"])
        assert len(turn) <= steps, options


def count_runs(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the runs that the script makes from now on; each ends clean at once."""
    numbers = []

    def make_run(clean: Any) -> dict[str, Any]:
        numbers.append(clean.number)
        return result_of(clean)

    monkeypatch.setattr(script, "make_run", make_run)
    return numbers


def test_runs_that_a_record_has_are_not_made_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.jsonl"
    lines = [line_of(clean) for clean in script.planned_runs(3)]
    record.write_text(lines[0] + lines[2] + lines[1][:40])  # killed while it wrote the last line
    made = count_runs(script, monkeypatch)
    words = ["3", "--record", str(record), "--page", str(tmp_path / "page.md")]
    assert script.script(words) == 0 and made == [1]
    assert script.script(words) == 0 and made == [1]
    page = (tmp_path / "page.md").read_text()
    assert "3 runs of 8 to 17 steps, of 3 recipes" in page
    assert "| emulate | dense: two blocks, default policy | 1 | 3 | 18 | 0 | 0 | 0 |" in page


def test_a_line_of_a_run_with_other_options_is_not_taken_for_a_run_of_today(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.jsonl"
    clean = next(script.planned_runs(1))
    changed = line_of(clean, options=[*clean.options[:-1], "run.seed=77"])
    without = {"run": asdict(clean), **result_of(clean)}
    record.write_text(changed + json.dumps(without) + "\n")
    made = count_runs(script, monkeypatch)
    words = ["1", "--record", str(record), "--page", str(tmp_path / "page.md")]
    assert script.script(words) == 0 and made == [0]
    assert script.script(words) == 0 and made == [0]


def test_the_page_says_which_layers_and_which_parts_no_audit_compared(
    script: ModuleType, tmp_path: Path
) -> None:
    record, page = tmp_path / "record.jsonl", tmp_path / "page.md"
    full, partial = list(script.planned_runs(2))
    why = "wgrad: its codes are not shown"
    record.write_text(
        line_of(full, layers=["blocks.0.mlp.up.3", "blocks.0.mlp.down"])  # of expert 3
        + line_of(partial, uncovered={why: ["blocks.0.mlp.up"]})
    )
    assert script.script(["2", "--record", str(record), "--page", str(page)]) == 0
    told = page.read_text()
    assert f"of 2 layers these were not audited: {partial.recipe}: blocks.0.mlp.down" in told
    assert f"- not compared, emulate: {why} (1 run; {partial.recipe})" in told
    assert "in 1 an audit could not compare all" in told


def test_a_finding_has_what_the_audits_left_out_and_what_the_run_printed_last(
    script: ModuleType, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    partly = {"event": "audit", "layer": "a", "gemms": ["fprop"], "uncovered": ["dgrad: hidden"]}
    fully = {"event": "audit", "layer": "b", "gemms": ["fprop"], "uncovered": []}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in (partly, fully, partly)))
    finding_of = importlib.import_module("audit_runs").finding_of
    finding = finding_of(metrics, 1, "x" * 5000 + "the last words")
    assert finding.audits == 3 and finding.layers == ["a", "b"]
    assert finding.uncovered == {"dgrad: hidden": ["a"]}
    assert finding.printed.endswith("the last words") and len(finding.printed) == 2000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"faults": ["wq fprop x: other codes"]}, "wq fprop x: other codes; exit code 0"),
        ({"failed": ["no memory"]}, "no memory; exit code 0"),
        ({"code": 3}, "exit code 3"),
        ({"audits": 0}, "exit code 0"),
    ],
    ids=lambda changes: next(iter(changes)) if isinstance(changes, dict) else "",
)
def test_a_run_that_is_not_clean_stands_on_the_page_with_its_command(
    script: ModuleType, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    record, page = tmp_path / "record.jsonl", tmp_path / "page.md"
    clean = next(script.planned_runs(1))
    record.write_text(line_of(clean, **changes))
    assert script.script(["1", "--record", str(record), "--page", str(page)]) == 1
    told = page.read_text().splitlines()
    assert any(line.startswith("`") and line.endswith(f"run.seed=0`: {said}") for line in told)
