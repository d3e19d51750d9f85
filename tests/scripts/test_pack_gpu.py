"""scripts/pack_gpu.py: the wheels that a machine with torch, Triton and transformers lacks, which are enough."""

import json
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pack_gpu
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {absent!r}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
from fp4train.cli import main
main({words!r})
"""
"""A program of fp4train that does not find some modules."""


def needed_by(*packages: str) -> set[str]:
    """The installed packages that these need, and themselves."""
    names: set[str] = set()
    pending = list(packages)
    while pending:
        name = canonicalize_name(pending.pop())
        if name in names:
            continue
        with suppress(PackageNotFoundError):
            requirements = map(Requirement, requires(name) or [])
            pending += [
                need.name
                for need in requirements
                if need.marker is None or need.marker.evaluate({"extra": ""})
            ]
            names.add(name)
    return names


@pytest.mark.long
def test_a_run_trains_to_its_end_where_only_torch_transformers_and_the_packed_wheels_are(
    tmp_path: Path,
) -> None:
    """All other packages of this environment are hidden, matplotlib and wandb among them."""
    there = needed_by("torch", "transformers", "triton", *pack_gpu.WHEELS) | {"fp4train"}
    owners = packages_distributions()
    absent = {
        module for module, names in owners.items() if not there & set(map(canonicalize_name, names))
    }
    assert {"wandb", "datasets", "matplotlib", "pyarrow"} <= absent
    run = tmp_path / "run"
    small = [
        "model=llama_tiny",
        "train.steps=3",
        "train.batch_size=2",
        "train.seq_len=32",
        "eval.batches=1",
    ]
    words = ["track=jsonl", *small, f"run.dir={run}"]
    program = WITHOUT.format(absent=absent, words=words)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 3, done" in done.stdout
    assert "figures need matplotlib" in done.stdout
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 3


def test_four_wheels_are_packed_in_the_versions_of_the_constraints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(pack_gpu, "pip", lambda *words: calls.append(words))
    assert pack_gpu.main([str(tmp_path / "wheels")]) == 0
    assert {words[-1].partition("==")[0] for words in calls} == set(pack_gpu.WHEELS)
    lines = (pack_gpu.ROOT / "constraints.txt").read_text().splitlines()
    assert {words[-1] for words in calls} <= set(lines)
    assert all("--no-deps" in words for words in calls)


def test_a_folder_that_holds_something_or_is_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(b"0" * 2_000_000)
    checkout = pack_gpu.checkout_bytes() / 1e6
    assert pack_gpu.say_size(tmp_path, checkout + 1) == 1
    assert "(--limit)" in capsys.readouterr().err
    assert pack_gpu.say_size(tmp_path, checkout + 3) == 0
    assert pack_gpu.main([str(tmp_path)]) == 2, "nothing is added to what somebody packed before"
