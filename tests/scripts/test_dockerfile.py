"""The Dockerfile, as far as it goes without Docker: its check of the image is run, what it copies exists."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def check(folder: Path, **versions: str) -> subprocess.CompletedProcess[str]:
    """The Dockerfile's Python, where these versions are installed."""
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (code,) = re.findall(r"<<'CHECK'.*?\n(.*?)^CHECK$", TEXT, re.DOTALL | re.MULTILINE)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_check_prints_every_dependency_but_torch(tmp_path: Path) -> None:
    done = check(tmp_path, torch="2.11.0a0+git123", transformer_engine="2.14.0+abc")
    assert done.returncode == 0, done.stderr
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert done.stdout.splitlines() == [
        line for line in dependencies if not line.startswith("torch")
    ]


@pytest.mark.parametrize(
    ("torch", "te", "words"),
    [
        ("2.9.1", "2.20.0", "torch 2.9.1; fp4train needs 2.11"),
        ("2.13.0", "2.13.0", "transformer_engine 2.13.0; fp4train needs 2.14"),
    ],
)
def test_an_older_image_stops_the_build(tmp_path: Path, torch: str, te: str, words: str) -> None:
    done = check(tmp_path, torch=torch, transformer_engine=te)
    assert done.returncode == 1
    assert words in done.stderr and "--build-arg IMAGE=" in done.stderr


def test_what_it_copies_and_says_that_one_runs_exists() -> None:
    for source in re.findall(r"^COPY (\S+)", TEXT, re.MULTILINE):
        assert (ROOT / source).exists(), source
    for script in re.findall(r"/opt/fp4train/(scripts/\S+)", TEXT):
        assert (ROOT / script).is_file(), script
