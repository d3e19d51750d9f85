"""Classes of other packages: only those that the caller names are imported, and each mistake has
one message.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fp4train.config import bind, complete, own_class, plugins
from fp4train.config.plugins import check_targets
from fp4train.errors import UserError
from fp4train.models import Architecture
from fp4train.optim import Optimizer
from fp4train.optim.adamw import AdamW
from fp4train.track import JsonlTracking, NoTracking, Tracking, WandbTracking

HEAD = "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
GOOD = f"""{HEAD}
from fp4train.precision import NVFP4

@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 8
    def build(self, *, vocab_size: int, seq_len: int): ...

@dataclass(frozen=True, kw_only=True)
class Descent:
    lr: float = 0.1
    def build(self, model): ...

@dataclass(frozen=True, kw_only=True)
class Unresolved:
    width: Widht = 8

class Plain:
    def build(self, *, vocab_size: int, seq_len: int): ...

class Undecorated(NVFP4):
    extra: int = 3
"""


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test imports is not there for the next one."""
    before = set(sys.modules)
    path = list(sys.path)
    yield
    assert sys.path == path, "the import path is as before"
    for name in set(sys.modules) - before:
        if not name.startswith("fp4train"):
            del sys.modules[name]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with the plugins `lab1` (a file) and `lab2` (a package)."""
    folder = tmp_path / "mine"
    (folder / "lab2" / "models").mkdir(parents=True)
    (folder / "lab1.py").write_text(GOOD)
    (folder / "lab2" / "__init__.py").write_text("")
    (folder / "lab2" / "models" / "__init__.py").write_text(GOOD)
    (folder / "lab2" / "broken.py").write_text("1 / 0\n")
    return folder


def said(target: str) -> str:
    with pytest.raises(UserError) as error:
        own_class(target, "model._target_")
    return str(error.value)


def test_a_class_is_found_in_a_file_and_in_a_package_beside_the_configs(mine: Path) -> None:
    with plugins.using(["lab1", "lab2"], [mine]):
        for target in ("lab1.Model", "lab2.models.Model"):
            found = bind({"_target_": target, "width": 3}, Architecture, "model")
            assert type(found).__name__ == "Model" and found.width == 3
            assert complete({"_target_": target}, Architecture) == {"_target_": target, "width": 8}


def test_outside_of_the_context_a_plugin_is_foreign_even_if_it_is_imported(mine: Path) -> None:
    with plugins.using(["lab1"], [mine]):
        assert own_class("lab1.Model", "model._target_").__name__ == "Model"
    assert "lab1" in sys.modules
    assert said("lab1.Model") == (
        "model._target_='lab1.Model' is no configuration class of fp4train; if you trust the "
        "package lab1, "
        "add plugins=[lab1]"
    )


def test_naming_a_submodule_allows_no_other(mine: Path) -> None:
    with plugins.using(["lab2.models"], [mine]):
        assert own_class("lab2.models.Model", "model._target_").__name__ == "Model"
        assert "add plugins=[lab2]" in said("lab2.broken.Model")
        assert "lab2.broken" not in sys.modules


def test_nothing_is_imported_to_refuse_a_target(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(mine))
    for target in ("evil.Model", "fp4train_evil.Model", "evil", ".evil.Model", "", 3):
        with pytest.raises(UserError, match="is no configuration class of fp4train"):
            check_targets({"model": {"_target_": target}})
    assert "evil" not in sys.modules
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("lab1.Modle", "lab1 has no Modle; did you mean 'Model'?"),
        (
            "lab1.Plain",
            "it is no dataclass; decorate it with @dataclass(frozen=True, kw_only=True)",
        ),
        ("lab1.dataclass", "is no configuration class of lab1"),
        ("lab1.deeper.Model", "there is no module lab1.deeper"),
        (
            "lab2.broken.Model",
            "lab2.broken cannot be imported: ZeroDivisionError: division by zero (",
        ),
        ("fp4train.precision.NVFP5", "fp4train.precision has no NVFP5; did you mean 'NVFP4'?"),
        ("fp4train.models.Architecture", "it is no dataclass"),
        ("fp4train.models.lama.Llama", "there is no module fp4train.models.lama"),
        ("fp4train.files.os.system", "is no configuration class of fp4train"),
        ("fp4train.config.binding.dataclasses.Field", "is no configuration class of fp4train"),
    ],
)
def test_what_is_no_configuration_class_is_refused(mine: Path, target: str, message: str) -> None:
    with plugins.using(["lab1", "lab2"], [mine]):
        assert message in said(target)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "nolab",
            None,
            "plugins=[nolab]: there is no module nolab among the installed packages and ",
        ),
        ("lab1.models", None, "there is no module lab1.models"),
        ("mine/lab1.py", None, "not by a path: plugins=[lab1], with --config-dir mine"),
        ("./mine/my lab", None, "not by a path: plugins=[mylab]"),
        ("sub", None, "plugins=[sub] holds no code: a package has a file __init__.py"),
        (
            "lab3",
            "def f(:\n",
            "plugins=[lab3] cannot be imported: SyntaxError: invalid syntax (lab3.py, line 1)",
        ),
        (
            "lab3",
            "import nothing_like_this",
            "cannot be imported: ModuleNotFoundError: No module named 'nothing_like",
        ),
        ("lab3", "import sys\nsys.exit(3)", "SystemExit: 3 ("),
    ],
)
def test_what_cannot_be_imported_is_one_message(
    mine: Path, name: str, content: str | None, message: str
) -> None:
    (mine / "sub").mkdir()
    if content is not None:
        (mine / "lab3.py").write_text(content)
    with pytest.raises(UserError) as error, plugins.using([name], [mine]):
        pass
    assert message in str(error.value) and "\n" not in str(error.value)
    assert plugins.named() == ()


def test_the_line_that_failed_is_named(mine: Path) -> None:
    (mine / "lab3.py").write_text("x = 1\nraise RuntimeError('no')")
    with pytest.raises(UserError, match=r"lab3\.py, line 2\)"), plugins.using(["lab3"], [mine]):
        pass


def test_a_folder_of_configs_cannot_replace_an_installed_package(mine: Path) -> None:
    (mine / "yaml").mkdir()
    (mine / "yaml" / "__init__.py").write_text("raise SystemExit('imported')")
    (mine / "colorsys.py").write_text("raise SystemExit('imported')")
    sys.modules.pop("colorsys", None)
    for name in ("yaml", "colorsys"):
        with (
            pytest.raises(UserError, match=r"is hidden by .*give it another name"),
            plugins.using([name], [mine]),
        ):
            pass


def test_a_class_without_what_its_place_needs_is_told_what(mine: Path) -> None:
    with plugins.using(["lab1"], [mine]):
        with pytest.raises(UserError) as error:
            bind({"_target_": "lab1.Descent"}, Optimizer, "optim")
        assert (
            str(error.value)
            == "optim: Descent cannot stand here; an Optimizer is needed: it has no clip"
        )
        with pytest.raises(UserError) as error:
            bind({"_target_": "lab1.Descent"}, Architecture, "model")
        assert str(error.value).endswith("it has no method build(vocab_size, seq_len)")
        with pytest.raises(
            UserError, match="cannot be resolved at run time: name 'Widht' is not defined"
        ):
            bind({"_target_": "lab1.Unresolved", "width": 3}, Any, "model")


def test_ours_serve_the_protocols() -> None:
    assert bind({"_target_": "fp4train.optim.adamw.AdamW"}, Optimizer, "optim") == AdamW()
    for kind in (JsonlTracking, WandbTracking, NoTracking):
        assert bind({"_target_": f"fp4train.track.{kind.__name__}"}, Tracking, "track") == kind()
    with pytest.raises(
        UserError,
        match="track: AdamW cannot stand here; a Tracking is needed: it has no method build",
    ):
        bind({"_target_": "fp4train.optim.adamw.AdamW"}, Tracking, "track")


def test_names_that_saved_runs_hold_resolve() -> None:
    for target in (
        "fp4train.precision.NVFP4",
        "fp4train.precision.BF16",
        "fp4train.precision.Phase",
        "fp4train.precision.LayerPolicy",
        "fp4train.models.llama.Llama",
        "fp4train.optim.adamw.AdamW",
        "fp4train.optim.schedule.WSD",
        "fp4train.data.stdlib.Stdlib",
        "fp4train.data.tokenizers.Bytes",
        "fp4train.track.WandbTracking",
    ):
        assert own_class(target, "x._target_").__name__ == target.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Types that fields of other people's classes may have."""

    sizes: list[int] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    mode: Literal["fast", "slow"] = "fast"
    more: Any = None


def test_fields_may_be_lists_mappings_and_literals() -> None:
    node = {"sizes": [1, 2], "rates": {"a": 1}, "mode": "slow", "more": {"b": [1, {"c": 2}]}}
    found = bind(node, Kinds, "kinds")
    assert found == Kinds(sizes=[1, 2], rates={"a": 1.0}, mode="slow", more={"b": [1, {"c": 2}]})
    assert isinstance(found.rates["a"], float)
    for wrong, message in (
        ({"mode": "fats"}, "kinds.mode='fats' must be one of fast, slow"),
        ({"sizes": [1, "x"]}, "kinds.sizes[1]='x' must be a whole number"),
        ({"rates": 3}, "kinds.rates=3 must be a dict"),
        ({"sizes": 3}, "kinds.sizes=3 must be a list"),
    ):
        with pytest.raises(UserError) as error:
            bind(wrong, Kinds, "kinds")
        assert str(error.value) == message


def test_a_plugins_files_are_its_whole_package_and_what_it_imports_beside_it(
    tmp_path: Path,
) -> None:
    """Ranks compare these: a table of values beside the code decides a run as much as the code
    does.
    """
    package = tmp_path / "ownlab5"
    (package / "tables" / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text("import beside5\n")
    (package / "tables" / "scales.json").write_text("[1]")
    (package / "tables" / "__pycache__" / "old.pyc").write_bytes(b"")
    (tmp_path / "beside5.py").write_text("factor = 2\n")
    (tmp_path / "unused.yaml").write_text("a: 1\n")
    with plugins.using(["ownlab5"], [tmp_path]):
        files = plugins.source_files()
    assert {name for name in files if "5" in name or "unused" in name} == {
        "ownlab5/__init__.py",
        "ownlab5/tables/scales.json",
        "beside5.py",
    }
    assert all(path.is_file() for path in files.values())
    assert plugins.source_files() == {}
