"""scripts/pack_gpu.py: the wheels that a machine with torch, Triton and transformers lacks, which are enough."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pack_gpu
import pytest
from packaging.requirements import Requirement

TARGET = pack_gpu.Target(python="3.12", platform="manylinux_2_28_x86_64")
FAST_TO_FAIL = ("--retries", "0", "--timeout", "10")

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
    found: set[str] = set()
    pending = list(packages)
    while pending:
        name = pack_gpu.normalised(pending.pop())
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            requirements = map(Requirement, lines)
            pending += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_what_is_packed_has_the_versions_of_the_constraints() -> None:
    packages = pack_gpu.wheels([], TARGET)
    lines = (pack_gpu.ROOT / "constraints.txt").read_text().splitlines()
    assert {line.partition("==")[0] for line in packages} == set(pack_gpu.WHEELS)
    assert set(packages) <= set(lines)


@pytest.mark.long
def test_a_run_trains_to_its_end_where_only_torch_transformers_and_the_packed_wheels_are(tmp_path: Path) -> None:
    """All other packages of this environment are hidden, matplotlib and wandb among them."""
    there = needed_by(*pack_gpu.MACHINE, "triton", *pack_gpu.WHEELS) | {"fp4train"}
    owners = packages_distributions()
    absent = {module for module, names in owners.items() if not there & set(map(pack_gpu.normalised, names))}
    assert {"wandb", "datasets", "matplotlib", "pyarrow"} <= absent
    run = tmp_path / "run"
    small = ["model=llama_tiny", "train.steps=3", "train.batch_size=2", "train.seq_len=32", "eval.batches=1"]
    words = ["track=jsonl", *small, f"run.dir={run}"]
    program = WITHOUT.format(absent=absent, words=words)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 3, done" in done.stdout
    assert "figures need matplotlib" in done.stdout
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 3


@pytest.mark.long
def test_the_wheels_of_the_registry_are_packed_and_their_size_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reach = [*pack_gpu.PIP, "download", *FAST_TO_FAIL, "--no-deps", "--dest", str(tmp_path / "reach")]
    if subprocess.run([*reach, "iniconfig"], capture_output=True).returncode:
        pytest.skip("pip reaches no registry of packages")
    folder = tmp_path / "wheels"
    assert pack_gpu.main([str(folder)]) == 0
    names = {path.name.partition("-")[0] for path in folder.iterdir()}
    assert names == {"hydra_core", "omegaconf", "antlr4_python3_runtime", "liger_kernel"}
    assert all(path.name.endswith("-py3-none-any.whl") for path in folder.iterdir()), "of any Python and machine"
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    assert 1 < size < 2
    assert re.search(rf"^ +{size:.2f} MB  {folder}, [\d.]+ MB with the files", capfd.readouterr().out, re.MULTILINE)


@pytest.fixture
def resolution(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip would choose, without a registry; gives what it was asked."""
    asked: list[str] = []
    machine = {"torch": "torch==2.11.0", "numpy": "numpy==2.4.6", "tqdm": "tqdm==4.70.1"}
    extra = {"datasets": "datasets==5.2.0", "pyarrow": "pyarrow==23.0.0", "numpy": "numpy==2.4.6"}

    def resolved(requirements: list[str], target: pack_gpu.Target) -> dict[str, str]:
        asked.extend(requirements)
        return machine if requirements == list(pack_gpu.MACHINE) else extra

    monkeypatch.setattr(pack_gpu, "resolved", resolved)
    return asked


def test_an_extra_comes_with_what_it_needs_but_not_with_what_the_machine_has(resolution: list[str]) -> None:
    packages = pack_gpu.wheels(["datasets"], TARGET)
    assert packages[len(pack_gpu.WHEELS) :] == ["datasets==5.2.0", "pyarrow==23.0.0"]
    assert "datasets==5.2.0" in resolution, "the version of constraints.txt"


@pytest.mark.parametrize(
    ("extra", "said"), [("dataset", "constraints.txt pins no such package"), ("torch", "the machine has it")]
)
def test_an_extra_that_is_unknown_or_there_is_refused(resolution: list[str], extra: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        pack_gpu.wheels([extra], TARGET)


def test_a_folder_that_holds_something_or_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pack(folder: Path, packages: list[str], target: pack_gpu.Target) -> None:
        (folder / "x-1-py3-none-any.whl").write_bytes(b"0" * 2_000_000)

    monkeypatch.setattr(pack_gpu, "pack", pack)
    monkeypatch.setattr(pack_gpu, "checkout_bytes", lambda: 3_000_000)
    folder = tmp_path / "wheels"
    assert pack_gpu.main([str(folder), "--limit", "4"]) == 1
    said = capsys.readouterr()
    assert "2.00 MB" in said.out and "5.0 MB with the files" in said.out and "more than 4 MB" in said.err
    assert pack_gpu.main([str(folder)]) == 2, "nothing is added to what somebody packed before"


def test_wheels_of_older_systems_run_on_newer_ones() -> None:
    assert TARGET.platforms()[0] == "manylinux_2_28_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(TARGET.platforms())
    assert "manylinux_2_34_x86_64" not in TARGET.platforms()
    other = pack_gpu.Target(python="3.12", platform="macosx_14_0_arm64")
    assert other.platforms() == ["macosx_14_0_arm64"]
