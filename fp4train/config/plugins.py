"""Classes that a configuration may name by `_target_`: fp4train's, and those of packages in
`plugins=[…]`.

Finding a class imports its module, which runs code. So the command line alone decides whose modules
may be imported: fp4train's, and those of the plugins it names. What stands in a run directory or a
YAML file never adds to them. Of these modules dataclasses count, and their defining module is
checked and not only their name, because attributes lead anywhere: "fp4train.files.os.system". A
configuration found in a run directory is therefore data: building a dataclass of ours stores
values, and foreign code does not run.

A plugin is an installed package, or a module or package in a folder given by --config-dir. Such a
folder is on Python's import path only while the plugins are imported, and last, so that nothing in
it can take an installed package's place.
"""

import dataclasses
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from fp4train.errors import UserError
from fp4train.text import first_line, near_miss

_USED: ContextVar[tuple[tuple[str, ...], tuple[Path, ...]]] = ContextVar(
    "plugins and their folders", default=((), ())
)
_PACKAGE = Path(__file__).parents[1]
_UNREAD = ("__pycache__", ".git")
"""Folders in a package that are no part of what it computes."""


@contextmanager
def using(names: Sequence[str], folders: Iterable[Path] = ()) -> Iterator[None]:
    """Import the packages `names`; inside the context `_target_` may name their classes.

    Args:
        names: names as in an import statement ("mylab", "mylab.models"); their submodules are
            included.
        folders: folders in which they are looked for after Python's own import path.

    Raises:
        UserError: one is no package's name, is not found, or fails when it is imported; or its code
            raised inside the context.
    """
    folders = tuple(folders)
    for name in names:
        _import_plugin(name, folders)
    token = _USED.set((tuple(names), folders))
    try:
        yield
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        module = str(frame.f_globals.get("__name__"))
        ours = module.partition(".")[0] == "fp4train"
        if isinstance(error, UserError) or ours or not may_define(module):
            raise
        raise UserError(f"the plugin {module} raised {describe_failure(error)}") from error
    finally:
        _USED.reset(token)


def named() -> tuple[str, ...]:
    """The plugins of the surrounding `using`."""
    return _USED.get()[0]


def source_files() -> dict[str, Path]:
    """The files that the plugins consist of, by names that are the same on every machine: whole
    packages, also what is not Python in them, and the modules that they imported from the folders
    of `using`.
    """
    if not named():
        return {}
    files: dict[str, Path] = {}
    for package in dict.fromkeys(name.partition(".")[0] for name in named()):
        for root in map(Path, getattr(sys.modules[package], "__path__", ())):
            paths = (path for path in sorted(root.rglob("*")) if not {*path.parts} & {*_UNREAD})
            files |= {
                f"{package}/{path.relative_to(root).as_posix()}": path
                for path in paths
                if path.is_file()
            }
    of_packages = {path.resolve() for path in files.values()}
    folders = [folder.resolve() for folder in _USED.get()[1]]
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "").resolve()
        beside = any(path.is_relative_to(folder) for folder in folders)
        if (beside or name in named()) and path.is_file() and path not in of_packages:
            files[f"{name.replace('.', '/')}{path.suffix}"] = path
    return files


def may_define(module: str) -> bool:
    """Whether configuration classes may come from `module`: it belongs to fp4train or to a named
    plugin.
    """
    return any(module == name or module.startswith(f"{name}.") for name in ("fp4train", *named()))


def describe_failure(error: BaseException) -> str:
    """Message of an exception during an import, and the last file and line outside of fp4train that
    led to it.
    """
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"  # names file and line itself
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(f"{_PACKAGE}{os.sep}")]
    last = (foreign or frames)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({last.filename}, line {last.lineno})"


def check_targets(node: Any, path: str = "") -> None:
    """Raise UserError if a `_target_` in a configuration is not a configuration class (see
    `own_class`).
    """
    for where, key, target in walk(node, path):
        if key == "_target_":
            own_class(target, where)


def own_class(target: object, where: str) -> type:
    """The configuration class that `target` names: a dataclass defined in fp4train or in a named
    plugin.

    Args:
        target: "module.Class".
        where: the full key of `target`, for error messages.

    Raises:
        UserError: it names something else.
    """
    module, _, name = str(target).rpartition(".")
    package = module.partition(".")[0]
    if not may_define(module):
        if package.isidentifier():
            hint = f"; if you trust the package {package}, add plugins=[{package}]"
        else:
            hint = ""
        raise UserError(f"{where}={target!r} is no configuration class of fp4train{hint}")
    refused = f"{where}={target!r} is no configuration class of {package}"
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{refused}: there is no module {error.name}") from error
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{refused}: {module} cannot be imported: {describe_failure(error)}"
        ) from error
    kind = getattr(holder, name, None)
    if kind is None:
        classes = [
            class_name
            for class_name, value in vars(holder).items()
            if dataclasses.is_dataclass(value)
        ]
        raise UserError(f"{refused}: {module} has no {name}{near_miss(name, classes)}")
    if not isinstance(kind, type) or not may_define(kind.__module__):
        raise UserError(refused)
    if "__dataclass_fields__" not in vars(kind):
        raise UserError(
            f"{refused}: it is no dataclass; decorate it with @dataclass(frozen=True, kw_only=True)"
        )
    return kind


def below(path: str, key: object) -> str:
    """The full key of a section's `key`; `path` is that of the section, empty for the whole."""
    return f"{path}.{key}" if path else str(key)


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(full key, key or index, value) of all that is below `node`, plain values whose own key is
    `path`.
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = below(path, key)
            yield where, key, value
            yield from walk(value, where)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            where = f"{path}[{index}]"
            yield where, index, value
            yield from walk(value, where)


def _import_plugin(name: str, folders: Sequence[Path]) -> None:
    if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
        path = Path(name)
        stem = path.name.removesuffix(".py")
        example = stem if stem.isidentifier() else "mylab"
        raise UserError(
            f"plugins=[{name}]: a plugin is named as in an import statement, not by a path: "
            f"plugins=[{example}], with "
            f"--config-dir {path.parent if path.parent.name else 'FOLDER'} if that is where it is"
        )
    with _import_path(folders):
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                looked = "".join(f" and {folder}" for folder in folders)
                raise UserError(
                    f"plugins=[{name}]: there is no module {error.name} among the installed "
                    f"packages{looked}: install it, or name its folder, --config-dir FOLDER"
                ) from error
            raise UserError(
                f"plugins=[{name}] cannot be imported: {describe_failure(error)}"
            ) from error
    if getattr(module, "__file__", None) is None:
        raise UserError(f"plugins=[{name}] holds no code: a package has a file __init__.py")
    _check_place(sys.modules[name.partition(".")[0]], folders)


@contextmanager
def _import_path(folders: Iterable[Path]) -> Iterator[None]:
    """Python's import path with `folders` at its end."""
    importlib.invalidate_caches()
    added = [
        place for place in (str(folder.absolute()) for folder in folders) if place not in sys.path
    ]
    sys.path.extend(added)
    try:
        yield
    finally:
        for place in added:
            with suppress(ValueError):
                sys.path.remove(place)


def _check_place(module: ModuleType, folders: Iterable[Path]) -> None:
    """Refuse a module in one of `folders` that another of its name hides."""
    name = module.__name__
    imported = Path(module.__file__ or "")
    for folder in folders:
        for beside in (folder / f"{name}.py", folder / name / "__init__.py"):
            if beside.is_file() and beside.resolve() != imported.resolve():
                raise UserError(
                    f"plugins=[{name}]: {beside} is hidden by {imported}; give it another name"
                )
