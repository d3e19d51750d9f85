"""The package as a newcomer gets it: from a wheel that an sdist gives, or the tree itself (-e)."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("wheel", "editable")
SMALL = (
    "model.layers=1",
    "train.steps=2",
    "train.batch_size=2",
    "train.seq_len=32",
    "eval.batches=1",
    "track=jsonl",
)
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
    "OMP_NUM_THREADS": "1",
    "CC": "no-such-compiler",  # the C extension takes long to build, and is not the point here
}
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")


def python(*arguments: str, of: Path | str = sys.executable, cwd: Path) -> str:
    """Run Python to its end; returns what it printed."""
    command = [str(of), *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_tree(target: Path) -> Path:
    """The files of the tree that an installation reads, without what tests and builds leave beside
    them.
    """
    ignored = shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__")
    for folder in ("fp4train", "configs", "recipes"):
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, target / name)
    return target


def package(kind: str, tree: Path, folder: Path) -> Path:
    """What `pip install` is given."""
    if kind == "editable":
        return tree
    # without a word for one of both: an sdist, and the wheel of that
    python("-m", "build", "--no-isolation", "--outdir", str(folder), str(tree), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(kind: str, folder: Path) -> Path:
    """Install fp4train into a fresh environment; returns its Python.

    The dependencies are lent by the environment of the tests. Its own fp4train stays behind,
    because .pth files in a folder that a .pth file names are not read; --ignore-installed keeps pip
    from touching it.
    """
    found = package(kind, copy_tree(folder / "tree"), folder)
    venv.create(folder / "env")
    interpreter = folder / "env" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    editable = ("-e",) if kind == "editable" else ()
    python(*PIP, "install", *options, *editable, str(found), of=interpreter, cwd=folder)
    return interpreter


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_every_config_and_trains_two_steps_outside_the_tree(
    kind: str, tmp_path: Path
) -> None:
    """Through the console script, with a recipe and an experiment; without a compiler the reference
    serves.
    """
    interpreter = install(kind, tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    code = """if True:
        import fp4train
        from fp4train.config import CONFIGS, RECIPES
        from fp4train.kernels import cpu
        print(fp4train.__file__, cpu.unavailable(), sep="\\n")
        for folder in (CONFIGS, RECIPES):
            for path in folder.rglob("*.yaml"):
                print(folder.name, path.relative_to(folder).as_posix(), sep="/")
    """
    where, compiler, *found = python("-c", code, of=interpreter, cwd=outside).splitlines()
    assert tmp_path / ("tree" if kind == "editable" else "env") in Path(where).parents
    assert "not built" in compiler
    here = [
        path.relative_to(ROOT).as_posix()
        for name in ("configs", "recipes")
        for path in (ROOT / name).rglob("*.*")
    ]
    assert sorted(found) == sorted(here) and "recipes/nvfp4.yaml" in found

    script = interpreter.parent / "fp4train"
    python(
        str(script),
        *SMALL,
        "recipe=nvfp4_plain",
        "experiment=techniques",
        of=interpreter,
        cwd=outside,
    )
    run = outside / "runs" / "techniques-nvfp4_plain"
    assert (
        len(
            [
                line
                for line in (run / "metrics.jsonl").read_text().splitlines()
                if "train/loss" in line
            ]
        )
        == 2
    )
    assert (run / "curves.png").stat().st_size > 10_000


def test_the_page_of_the_package_has_no_links_to_files_that_are_not_there(tmp_path: Path) -> None:
    command = (
        "from setuptools.build_meta import prepare_metadata_for_build_wheel as p; "
        f"print(p({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text = (tmp_path / done.stdout.splitlines()[-1] / "METADATA").read_text("utf-8")
    page = text.partition("\n\n")[2]
    assert "Description-Content-Type: text/markdown" in text and page.startswith("# fp4train")
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert targets and all(target.startswith("http") for target in targets)
