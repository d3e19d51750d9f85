"""The one way of tests to a finished run."""

import io
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from command_line import named, tiny

from fp4train.cli import main


class FinishedRuns:
    """`finished("recipe=nvfp4", …)`: the directory of a tiny run that has ended, trained once for
    all tests of a process that name the same words. They read it and leave it as it is;
    `Cli.trained` copies it.

    Each run has a folder of its own, which pytest makes, and begins there: its words cannot name
    what a test has in its working directory.
    """

    def __init__(self, text: Path, factory: pytest.TempPathFactory) -> None:
        self.text = text
        self.factory = factory
        self.runs: dict[tuple[str, ...], Path] = {}

    def __call__(self, *words: str) -> Path:
        if words not in self.runs:
            self.runs[words] = self._train(words)
        return self.runs[words]

    def _train(self, words: tuple[str, ...]) -> Path:
        name = named(words)
        place = self.factory.mktemp("finished")
        said = io.StringIO()
        with (
            chdir(place),
            redirect_stdout(said),
            redirect_stderr(said),
            warnings.catch_warnings(),
            pytest.raises(SystemExit) as ended,
        ):
            main([*tiny(self.text, *words), f"run.name={name}"])
        assert ended.value.code == 0, said.getvalue()
        return place / "runs" / name
