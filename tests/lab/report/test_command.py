"""The verb `report`: the file that it writes, and what it refuses."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from made import write_run

from fp4train import files
from fp4train.cli import main
from fp4train.errors import UserError
from fp4train.lab.report import read_report


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.mark.usefixtures("sketched")
def test_the_command_writes_the_file_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    code, out, err = command(capsys, "a", "nothing")
    assert code == 0 and out.startswith("report.html: ") and "nothing is not a run directory" in err
    assert command(capsys, "a", "out=b.html")[0] == 0 and (tmp_path / "b.html").is_file()
    assert command(capsys, "baseline=a", "out=c.html")[0] == 0 and (tmp_path / "c.html").is_file()


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "report needs run directories"),
        (("nothing",), "no run can be reported: nothing is not a run directory"),
        (("a", "steps=3"), "unknown key 'steps' (known: baseline, out, figures"),
        (("a", "out=x.pdf"), "the name must end in .html"),
        (("a", "out=no/x.html"), "there is no folder no"),
        (("a", "out=folder.html"), "is a folder"),
    ],
)
def test_what_is_impossible_is_refused(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    (tmp_path / "folder.html").mkdir()
    code, _, err = command(capsys, *arguments)
    assert code == 1 and message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder.html"]


@pytest.mark.usefixtures("sketched")
def test_a_full_disk_leaves_the_report_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    out.write_text("before")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = write_run(tmp_path / "a")
    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        read_report([run], out).write(out)
    assert out.read_text() == "before" and len(list(tmp_path.iterdir())) == 2
