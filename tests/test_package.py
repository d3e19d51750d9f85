"""The package as a newcomer gets it: a wheel, in an environment of its own, away from the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel that was built from the sdist, on a machine without a C compiler.

    The dependencies are lent by the environment of the tests; its own (editable) fp4train stays behind, because .pth
    files in a folder that a .pth file names are not read.
    """
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    # Hidden folders, .hypothesis among them, are written by tests that run at the same time.
    ignored = shutil.ignore_patterns(".*", "build", "runs", "wandb", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    no_compiler = {**os.environ, "CC": "no-such-compiler"}
    done = subprocess.run(build, capture_output=True, text=True, env=no_compiler, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    venv.create(folder / "env")
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = (folder / "dist").glob("*.whl")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            "--target",
            str(packages),
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    return folder / "env"


def run(environment: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [str(environment / "bin" / "python"), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_an_installed_wheel_trains_two_steps_outside_the_repository(environment: Path, tmp_path: Path) -> None:
    small = ["model.layers=2", "train.steps=2", "train.batch_size=2", "train.seq_len=32", "eval.batches=1"]
    done = run(environment, "-m", "fp4train", *small, "track=jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/llama_tiny-nvfp4/curves.png").stat().st_size > 10_000
    where = run(environment, "-c", "import fp4train; print(fp4train.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(environment))


def test_without_a_compiler_the_reference_serves_and_says_so(environment: Path, tmp_path: Path) -> None:
    code = "from fp4train.kernels import cpu; print(cpu.unavailable())"
    done = run(environment, "-c", code, cwd=tmp_path)
    assert "not built" in done.stdout, done.stderr


def test_the_wheel_holds_every_config_and_recipe(environment: Path, tmp_path: Path) -> None:
    code = (
        "from fp4train.config import CONFIGS; print(*sorted(p.relative_to(CONFIGS) for p in CONFIGS.rglob('*.yaml')))"
    )
    installed = run(environment, "-c", code, cwd=tmp_path).stdout.split()
    configs = ROOT / "configs"
    here = [p.relative_to(configs).as_posix() for p in configs.rglob("*.yaml")]
    here += [f"recipe/{p.name}" for p in (ROOT / "recipes").glob("*.yaml")]
    assert set(installed) == set(here)


def test_importing_fp4train_imports_nothing_heavy_besides_torch() -> None:
    code = "import sys, fp4train; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"transformer_engine", "triton", "wandb", "datasets", "matplotlib", "tokenizers", "hydra", "torchao"}
    assert not heavy & set(loaded)
