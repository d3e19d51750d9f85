"""The verb `report`: the file that it writes, and what it refuses."""

import re
from pathlib import Path

import pytest
from command_line import Cli
from made import write_run


@pytest.mark.usefixtures("sketched")
def test_the_command_writes_the_file_and_says_what_is_missing(cli: Cli) -> None:
    write_run(Path("a"))
    ended = cli.raw("report", "a", "nothing")
    assert ended.code == 0 and ended.out.startswith("report.html: ")
    assert "nothing is not a run directory" in ended.err
    for words in (("a", "out=b.html"), ("baseline=a", "out=c.html")):
        assert cli.raw("report", *words).code == 0
    assert Path("b.html").is_file() and Path("c.html").is_file()


@pytest.mark.usefixtures("sketched")
def test_labels_name_runs_in_the_order_of_the_command(cli: Cli) -> None:
    for run in ("a", "b"):
        write_run(Path(run))
    assert cli.raw("report", "a", "b", "baseline=b", "labels=First,Second").code == 0
    page = Path("report.html").read_text("utf-8")
    assert re.search("1.{0,60}Second", page) and re.search("2.{0,60}First", page)
    refused = cli.raw("report", "a", "b", "labels=First")
    assert refused.code == 1 and "labels= names 1 runs of 2" in refused.message


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "report needs run directories"),
        (("nothing",), "no run can be reported: nothing is not a run directory"),
        (("a", "steps=3"), "unknown key 'steps'"),
        (("a", "gpu=B200"), "unknown key 'gpu': times of a GPU are those of fp4train plan RUN"),
        (("a", "out=x.pdf"), "the name must end in .html"),
        (("a", "out=no/x.html"), "there is no folder no"),
        (("a", "out=folder.html"), "is a folder"),
    ],
)
def test_what_is_impossible_is_refused(cli: Cli, words: tuple[str, ...], message: str) -> None:
    write_run(Path("a"))
    Path("folder.html").mkdir()
    ended = cli.raw("report", *words)
    assert ended.code == 1 and message in ended.message
    assert sorted(path.name for path in Path().iterdir()) == ["a", "folder.html"]
