"""scripts/pack_gpu.py: the wheels that a machine with torch, Triton and transformers lacks, which are enough."""

import json
import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pack_gpu
import pytest
from packaging.requirements import Requirement

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
        name = pack_gpu.normalised(pending.pop())
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


def test_the_machine_has_what_torch_and_transformers_need_in_each_version() -> None:
    """What is taken to be there must be, or a wheel that needs it fails; so it is less than what
    they need today.
    """
    assert {name for name in pack_gpu.MACHINE if name != "triton"} <= needed_by(
        "torch", "transformers", "numpy"
    )


@pytest.mark.long
def test_a_run_trains_to_its_end_where_only_torch_transformers_and_the_packed_wheels_are(
    tmp_path: Path,
) -> None:
    """All other packages of this environment are hidden, matplotlib and wandb among them."""
    there = needed_by("torch", "transformers", "triton", *pack_gpu.WHEELS) | {"fp4train"}
    owners = packages_distributions()
    absent = {
        module
        for module, names in owners.items()
        if not there & set(map(pack_gpu.normalised, names))
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


REGISTRY = {
    "hydra-core": ["omegaconf<2.4", "antlr4-python3-runtime==4.9.*", "packaging"],
    "omegaconf": ["PyYAML>=5.1", "antlr4-python3-runtime==4.9.*"],
    "antlr4-python3-runtime": [],
    "liger-kernel": ["torch>=2.1.2", "triton>=2.3.1", "pytest; extra == 'dev'"],
    "accelerate": ["torch>=2.0", "psutil", "Some.Extra[fast]>=2", "old; python_version < '3.12'"],
    "psutil": ["pywin32; sys_platform == 'win32'", "arm; platform_machine == 'aarch64'"],
    "some-extra": ["speedup==1; extra == 'fast'", "docs; extra == 'docs'"],
    "speedup": [],
}
"""Package → what it needs."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is asked for, whose registry is `REGISTRY`."""
    requirements: list[str] = []

    def pip(*words: str) -> None:
        folder = words[words.index("--wheel-dir" if words[0] == "wheel" else "--dest") + 1]
        name = pack_gpu.normalised(Requirement(words[-1]).name)
        requirements.append(words[-1])
        assert "--no-deps" in words and (words[0] == "wheel") == (name in pack_gpu.SOURCES)
        with zipfile.ZipFile(Path(folder, f"{name}-1-py3-none-any.whl"), "w") as wheel:
            lines = "".join(f"Requires-Dist: {need}\n" for need in REGISTRY[name])
            wheel.writestr(f"{name}-1.dist-info/METADATA", f"Name: {name}\n{lines}\nAbout it")

    monkeypatch.setattr(pack_gpu, "pip", pip)
    return requirements


def test_four_wheels_are_packed_in_the_versions_of_the_constraints(
    asked: list[str], tmp_path: Path
) -> None:
    assert pack_gpu.main([str(tmp_path / "wheels")]) == 0
    assert {Requirement(line).name for line in asked} == set(pack_gpu.WHEELS) and len(asked) == 4
    assert set(asked) <= set((pack_gpu.ROOT / "constraints.txt").read_text().splitlines())


def test_an_extra_comes_with_what_it_needs_there_and_torch_is_never_downloaded(
    asked: list[str], tmp_path: Path
) -> None:
    assert pack_gpu.main([str(tmp_path / "wheels"), "--with", "accelerate"]) == 0
    pinned = pack_gpu.pins()["accelerate"]
    assert asked[len(pack_gpu.WHEELS) :] == [pinned, "psutil", "Some.Extra>=2", "speedup==1"]


def test_an_extra_that_is_unknown_is_refused(asked: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="pins no such package"):
        pack_gpu.main([str(tmp_path / "wheels"), "--with", "dataset"])
    assert not asked and not (tmp_path / "wheels").exists()


def test_a_folder_that_holds_something_or_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pack(folder: Path, names: list[str], target: pack_gpu.Target) -> None:
        (folder / "x-1-py3-none-any.whl").write_bytes(b"0" * 2_000_000)

    monkeypatch.setattr(pack_gpu, "pack", pack)
    monkeypatch.setattr(pack_gpu, "checkout_bytes", lambda: 3_000_000)
    folder = tmp_path / "wheels"
    assert pack_gpu.main([str(folder), "--limit", "4"]) == 1
    assert "more than 4 MB" in capsys.readouterr().err
    assert pack_gpu.main([str(folder)]) == 2, "nothing is added to what somebody packed before"
