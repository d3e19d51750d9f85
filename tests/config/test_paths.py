"""What names a file is told by the type of its field, in other people's classes, too."""

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest

from fp4train.config import Config, bind, path_values, plugins, schema
from fp4train.config.overrides import as_typed, parse
from fp4train.data import HuggingFace
from fp4train.paths import PathText, is_hub_name, lies_in


@dataclass(frozen=True, kw_only=True)
class Part:
    file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A source of a plugin."""

    root: Path
    title: str
    more: Sequence[Path] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    index: PathText | None = "default.idx"
    pair: tuple[int, Path] = (0, Path("a"))

    def build(self, run_dir: Path, seq_len: int, seed: int) -> Any: ...


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The classes above as those of a plugin."""
    module = ModuleType("lab")
    module.__file__ = __file__
    module.Corpus = Corpus  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lab", module)
    monkeypatch.setattr(Corpus, "__module__", "lab")
    with plugins.using(["lab"]):
        yield


@pytest.mark.usefixtures("lab")
def test_every_field_of_a_plugins_class_that_is_a_path_is_found() -> None:
    data = {
        "_target_": "lab.Corpus",
        "root": "/r",
        "title": "/no/path",
        "more": ["m", "n"],
        "index": "default.idx",
    }
    data |= {"parts": {"one": {"file": "f"}}, "pair": [3, "p"]}
    found = list(path_values({"data": data}, Config))
    assert found == [
        ("data.root", "/r"),
        *(("data.more", "m"), ("data.more", "n"), ("data.parts.one.file", "f"), ("data.pair", "p")),
    ]
    assert list(path_values({"data": {**data, "index": "other.idx"}}, Config))[3] == (
        "data.index",
        "other.idx",
    )


def test_a_path_is_text_to_the_class_that_has_it() -> None:
    made = bind(
        {"_target_": "fp4train.data.huggingface.HuggingFace", "path": "/x"}, HuggingFace, "data"
    )
    assert made.path == "/x" and type(made.path) is str


def test_a_name_on_the_hub_is_no_path_where_nothing_here_has_it(working_folder: Path) -> None:
    assert all(map(is_hub_name, ("gpt2", "openai-community/gpt2")))
    assert not any(
        map(is_hub_name, ("~/gpt2", "/a", "./a", "../a", "a/b/c", "tokenizer.json", "s3://a/b"))
    )
    (working_folder / "gpt2").mkdir()
    assert not is_hub_name("gpt2")
    data = {"_target_": "fp4train.data.huggingface.HuggingFace", "name": "gpt2"}
    assert dict(path_values({"data": data}, Config)) == {"data.name": "gpt2"}


def test_links_and_dots_do_not_bring_a_path_into_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    (run / "out").symlink_to("/etc")
    assert lies_in(str(run), run) and lies_in(f"{run}/data/x", run)
    assert not any(
        lies_in(f"{run}/{each}", run) for each in ("../x", "out/x", "data/../../x", "a\0b")
    )
    assert not lies_in(f"{run}2", run)


@pytest.mark.parametrize(
    "value", ["/a/b-1.txt", "~/x", "/with space/$(rm)", "it's", "a=b,c", "[x", "/é"]
)
def test_what_is_to_be_typed_reads_back_as_it_was(value: str) -> None:
    import shlex

    (word,) = shlex.split(as_typed("data.path", value))
    assert parse([word])[0].value() == value


def test_every_field_of_our_own_that_is_called_a_path_is_of_a_type_that_says_so() -> None:
    """A field `path: str` would be followed wherever somebody else's configuration leads."""
    from fp4train import data, models, optim, track

    called = re.compile(r"(.*_)?(path|dir|file|folder)s?")
    found = set()
    modules = [
        importlib.import_module(each.name)
        for package in (data, models, optim, track)
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    for kind in {
        v
        for m in [*modules, schema]
        for v in vars(m).values()
        if isinstance(v, type) and is_dataclass(v)
    }:
        hints = get_type_hints(kind, include_extras=True)
        for name in (each.name for each in fields(kind) if called.fullmatch(each.name)):
            assert "Path" in repr(hints[name]), (
                f"{kind.__name__}.{name} must be of type Path or PathText"
            )
            found.add(f"{kind.__name__}.{name}")
    assert found >= {"Text.path", "Tokens.val_path", "HuggingFace.cache_dir", "RunSettings.dir"}
