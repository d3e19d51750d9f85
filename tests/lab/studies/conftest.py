"""A tiny trained run that studies look at."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY, Cli

from fp4train.cli import main
from fp4train.run.record import directory as run_directory


@pytest.fixture(scope="session")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 3 and 6; tests leave it as it is."""
    run = tmp_path_factory.mktemp("runs") / "a"
    data = (f"data.path={text}", f"data.cache_dir={text.parent / 'cache'}")
    tokenizer = ("data/tokenizer=bpe", "data.tokenizer.vocab_size=300")
    with pytest.raises(SystemExit) as ended:
        main([*TINY, *data, *tokenizer, f"run.dir={run}", "checkpoint.every=3"])
    assert ended.value.code == 0
    return run


@pytest.fixture
def cli(
    text: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Cli:
    """The command line in a working directory that has a copy of the trained run, runs/a."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs/a")
    return Cli(text, tmp_path, capsys)


@pytest.fixture
def config_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The saved configurations that are read and checked, each time."""
    read = list[Path]()
    plain = run_directory.saved_config

    def saved_config(path: Path) -> dict[str, Any]:
        read.append(path)
        return plain(path)

    monkeypatch.setattr(run_directory, "saved_config", saved_config)
    return read
