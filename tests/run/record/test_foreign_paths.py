"""A configuration that this user did not write reaches nothing outside of its run, unless the
command names it.
"""

import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import STEADY, Cli, everything, losses, reseal_config
from hf_folders import byte_tokenizer

from fp4train.data.tokenizers import Pretrained
from fp4train.errors import UserError
from fp4train.run.record.trust import own_tokenizer

HOSTILE = {
    "data.path": "secret",
    "data.cache_dir": "tmp/pub",
    "init": "runs/other",
    "data.tokenizer.name": "secret/tokenizer.json",
}
VERBS = {
    "resume": ("resume=runs/a", "train.steps=3"),
    "plan": ("plan", "resume=runs/a"),
    "rank": ("rank", "runs/a"),
}
READERS = {
    "plan RUN": ("plan", "runs/a"),
    "report": ("report", "runs/a"),
    "compare": ("compare", "runs/a", "runs/a"),
    "swap": ("swap", "runs/a"),
}


@pytest.fixture
def foreign(cli: Cli) -> Path:
    """A finished run of this user in runs/a, and things outside of it that are not its business."""
    cli.trained("run.name=a", "train.steps=2", *STEADY)
    Path("secret").write_text("my key " * 1000)
    Path("home/.kube").mkdir(parents=True)
    Path("home/.kube/config.yaml").write_text("clusters: []\n")
    return Path("runs/a")


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a key of a plain configuration."""
    *sections, last = key.split(".")
    for section in sections:
        values = values[section]
    values[last] = value


def hostile(run: Path) -> None:
    """Every key of `HOSTILE` leads out of the run."""

    def change(values: dict[str, Any]) -> None:
        values["data"]["tokenizer"] = {"_target_": "fp4train.data.tokenizers.Pretrained"}
        for key, value in HOSTILE.items():
            put(values, key, value)

    reseal_config(run, change)


def untouched(folder: Path) -> dict[Path, bytes]:
    """What no command may change by being refused; the lock of a run is its own."""
    return {path: data for path, data in everything(folder).items() if path.name != ".lock"}


def leading_out(opened: list[str]) -> list[str]:
    """Those of the opened paths that only `HOSTILE` names."""
    places = tuple(
        f"{folder}{value}" for value in HOSTILE.values() for folder in ("", f"{Path.cwd()}/")
    )
    return [each for each in opened if each.startswith(places)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that are opened or listed, for as long as the test lasts."""
    found: list[str] = []
    on = [True]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if on and event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename"):
            found.append(
                os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""
            )

    sys.addaudithook(hear)
    yield found
    on.clear()


@pytest.mark.parametrize("verb", VERBS)
def test_paths_of_a_foreign_configuration_are_refused_by_name_and_not_touched(
    cli: Cli, foreign: Path, opened: list[str], verb: str
) -> None:
    hostile(foreign)
    before = untouched(cli.folder)
    opened.clear()
    said = cli.raw(*VERBS[verb]).message
    assert said.startswith(
        "runs/a/config.yaml names paths, services or commands outside of the run and has no signature"
    )
    assert set(said.rpartition("to the command: ")[2].split()) == {
        f"{key}={value}" for key, value in HOSTILE.items()
    }
    assert not leading_out(opened) and untouched(cli.folder) == before
    reseal_config(foreign, lambda values: put(values, "data.path", "runs/a/text.txt"))
    named = [
        f"{key}={value}"
        for key, value in HOSTILE.items()
        if key not in ("data.path", "data.cache_dir")
    ]
    said = cli.raw(*VERBS[verb], *named).message
    assert said.endswith("to the command: data.cache_dir=tmp/pub"), "a path in the run is its own"


@pytest.mark.parametrize(
    "paths",
    [
        ["runs/a/text.txt", "secret"],
        ["runs/a/text.txt", "runs/a/../../secret"],
        ["runs/a/*.txt"],
    ],
)
def test_one_of_several_paths_that_leads_out_is_enough(
    cli: Cli, foreign: Path, opened: list[str], paths: list[str]
) -> None:
    """A pattern may lead anywhere: links match it."""
    Path("runs/a/text.txt").write_text("text " * 1000)
    reseal_config(foreign, lambda values: put(values, "data.path", paths))
    opened.clear()
    said = cli.raw(
        "resume=runs/a", "train.steps=3", f"data.cache_dir={cli.folder / 'cache'}"
    ).message
    assert "names paths, services or commands outside of the run and has no signature" in said
    listed = ",".join(f"'{path}'" for path in paths)
    assert shlex.split(said.rpartition("to the command: ")[2])[0] in (
        f"data.path=[{listed}]",
        f"data.path={listed}",
    )
    assert not any("secret" in path for path in opened)


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize("verb", READERS)
def test_verbs_that_only_show_a_foreign_run_follow_none_of_its_paths(
    cli: Cli, foreign: Path, opened: list[str], verb: str
) -> None:
    hostile(foreign)
    opened.clear()
    ended = cli.raw(*READERS[verb])
    assert ended.code == 0 and not leading_out(opened)


def test_a_command_that_names_the_paths_goes_on_and_signs_them(cli: Cli, foreign: Path) -> None:
    reseal_config(foreign, lambda values: put(values, "data.cache_dir", "home"))
    assert "data.cache_dir=home" in cli.raw("resume=runs/a", "train.steps=3").message
    assert cli.raw("resume=runs/a", "train.steps=3", *cli.paths).code == 0
    assert sorted(losses("runs/a")) == [1, 2, 3]
    assert cli.raw("resume=runs/a", "train.steps=4").code == 0, "they are this user's by now"


def test_a_run_of_another_machine_says_what_to_add(
    cli: Cli,
    foreign: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("other machine")))
    said = cli.raw("resume=runs/a", "train.steps=3").message
    assert "has the signature of another user or another machine" in said
    assert set(said.rpartition("to the command: ")[2].split()) == set(cli.paths)
    assert cli.raw("resume=runs/a", "train.steps=3", *cli.paths).code == 0


def test_the_key_is_the_users_alone_and_defaults_need_none(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert cli("run.name=a", "train.steps=1", *STEADY).code == 0
    key = tmp_path / "state/fp4train/key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and key.stat().st_size == 32
    key.chmod(0o644)
    said = cli.raw("resume=runs/a", "train.steps=2").message
    assert (
        f"cannot be told to be yours ({key}: " in said and "others can read it: remove it)" in said
    )
    shutil.rmtree(tmp_path / "state")
    default = ("run.name=b", "train.steps=1", "data=stdlib", *STEADY)
    tiny = [a for a in cli.tiny(*default) if not a.startswith("data.")]
    assert cli.raw(*tiny).code == 0 and not (tmp_path / "state").exists()
    assert cli.raw("resume=runs/b", "train.steps=2").code == 0


def test_without_a_place_for_the_key_a_run_trains_and_says_so_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc")
    ended = cli("run.name=a", "train.steps=1", *STEADY)
    assert ended.code == 0 and ended.err.count("cannot be signed as yours") == 1
    assert "a resume must name data.path, data.cache_dir again" in ended.err
    assert "has no signature" in cli.raw("resume=runs/a", "train.steps=2").message


def test_a_tokenizer_that_a_run_has_lost_is_asked_for_before_it_is_read_elsewhere(
    tmp_path: Path,
) -> None:
    """Whatever reads it: an export, an evaluation, a student of the run."""

    def refuse(lost: str) -> None:
        raise UserError(f"no {lost}")

    elsewhere = tmp_path / "tokenizer.json"
    run = tmp_path / "run"
    elsewhere.write_text(byte_tokenizer())
    settings = Pretrained(name=str(elsewhere), end_of_document="<|end-of-text|>")
    config: Any = SimpleNamespace(data=SimpleNamespace(tokenizer=settings))
    run.mkdir()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        own_tokenizer(config, run, refuse)
    read = own_tokenizer(config, run, lambda lost: None)
    assert read is not None and not os.listdir(run), "nothing is written to the run"
    settings.build(iter, run)
    elsewhere.unlink()
    kept = own_tokenizer(config, run, refuse)
    assert kept is not None and kept.identity == read.identity
