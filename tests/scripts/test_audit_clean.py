"""scripts/audit_clean.py: 300 runs have everything that runs here, and a later call goes on."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("audit_clean")


def line_of(clean: Any, **changes: Any) -> str:
    result = {"audits": 6, "faults": [], "failed": [], "code": 0, "seconds": 3.0, "commit": "abc"}
    return json.dumps({"run": asdict(clean), **result, **changes}) + "\n"


def test_300_runs_have_all_recipes_backends_and_models_on_one_rank_and_on_two(
    script: ModuleType,
) -> None:
    ways: dict[str, set[tuple[str, str, int]]] = {}
    meshes = set()
    for clean in script.planned_runs(300):
        ways.setdefault(clean.recipe, set()).add((clean.backend, clean.model, clean.ranks))
        meshes.add(clean.mesh)
    assert sorted(ways) == script.RECIPES
    assert meshes == {"", *script.MESHES}
    for recipe, of_recipe in ways.items():
        backends = {"emulate", "reference"} | ({"native"} if recipe in script.NATIVE else set())
        assert {backend for backend, _, _ in of_recipe} == backends
        assert {(model, ranks) for _, model, ranks in of_recipe} == {
            ("dense", 1),
            ("dense", 2),
            ("experts", 1),
            ("experts", 2),
        }


def test_runs_that_a_record_has_are_not_made_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.jsonl"
    lines = [line_of(clean) for clean in script.planned_runs(3)]
    record.write_text(lines[0] + lines[2] + lines[1][:40])  # killed while it wrote the last line
    made = []

    def made_run(clean: Any) -> dict[str, Any]:
        made.append(clean.number)
        result: dict[str, Any] = json.loads(line_of(clean))
        result.pop("run")
        return result

    monkeypatch.setattr(script, "make_run", made_run)
    words = ["3", "--record", str(record), "--page", str(tmp_path / "page.md")]
    assert script.script(words) == 0 and made == [1]
    assert script.script(words) == 0 and made == [1]
    page = (tmp_path / "page.md").read_text()
    assert "3 runs of 6 steps, of 3 recipes" in page
    assert "| emulate | dense | 1 | 3 | 18 | 0 | 0 |" in page


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
