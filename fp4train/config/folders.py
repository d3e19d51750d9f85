"""The folders of fp4train's YAML files, and how the recipes among them enter Hydra.

In a checkout `configs/` and `recipes/` stand beside the package; in an installed package they are
inside it (setup.py maps them there). `configs/` is Hydra's primary folder. `recipes/` holds the
options of the group `recipe` without a folder of that name above them, so they are given to Hydra
through its ConfigStore. So are single files that a command names as an option (policy=FILE.yaml).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from fp4train.errors import UserError, check_local
from fp4train.text import first_line

_PACKAGE = Path(__file__).parent.parent


def _folder(name: str) -> Path:
    inside = _PACKAGE / name
    if inside.is_dir():
        return inside
    return _PACKAGE.parent / name


CONFIGS = _folder("configs")
RECIPES = _folder("recipes")


@dataclass(frozen=True)
class _Unread:
    """A YAML file, which is read when Hydra copies it to compose it: one recipe of the many."""

    path: Path

    def __deepcopy__(self, memo: object) -> Any:
        return OmegaConf.load(self.path)


class _Option(ConfigNode):
    """An option that is not copied with all of Hydra's state."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


@cache
def register_recipes() -> None:
    """Give Hydra the files of `RECIPES` as the options of its group `recipe`."""
    store = ConfigStore.instance().repo.setdefault("recipe", {})
    for path in sorted(RECIPES.glob("*.yaml")):
        unread: Any = _Unread(path)
        store[path.name] = _Option(path.name, unread, "recipe", package=None, provider="fp4train")


def options(folder: Path) -> dict[str, list[str]]:
    """Config group → its options in a folder of configs, nested groups with a slash
    ("data/tokenizer").
    """
    by_group: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/*.yaml")) + sorted(folder.glob("*/*/*.yaml")):
        by_group.setdefault(path.parent.relative_to(folder).as_posix(), []).append(path.stem)
    return by_group


@cache
def own_options() -> Mapping[str, Sequence[str]]:
    """`options` of fp4train, the recipes among them."""
    return options(CONFIGS) | {"recipe": sorted(path.stem for path in RECIPES.glob("*.yaml"))}


def option_of(group: str, target: type) -> str:
    """The option of `group` whose file names a class; of a class that none names, its name."""
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        body = OmegaConf.load(path)
        named = f"{target.__module__}.{target.__qualname__}"
        if isinstance(body, DictConfig) and body.get("_target_") == named:
            return path.stem
    return target.__name__


_FILE = "file "
"""Begins the provider of options that are single files, in Hydra's ConfigStore; their path
follows.
"""


def register_file(group: str, path: Path) -> str:
    """Give Hydra a YAML file as an option of `group`; returns the option's name.

    The name is that of the file, or with a checksum of its path where an option of that name is
    there already.

    Raises:
        UserError: there is no such file, or it is no mapping in YAML.
    """
    check_local(path, group)
    try:
        body = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"{group}={path}: there is no such file") from None
    except YAMLError as error:
        raise UserError(f"{group}={path} cannot be read: {yaml_problem(error)}") from error
    except (
        OSError,
        OmegaConfBaseException,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        raise UserError(f"{group}={path} cannot be read: {first_line(error)}") from error
    if not isinstance(body, DictConfig):
        raise UserError(
            f"{group}={path} must hold keys and values, as the files in {CONFIGS / group} do"
        )
    provider = f"{_FILE}{path.absolute()}"
    name = path.stem
    taken = {**dict.fromkeys(own_options().get(group, ())), **_registered(group)}
    if taken.get(name, provider) != provider or not name.replace("-", "_").isidentifier():
        name = f"file-{hashlib.sha256(provider.encode()).hexdigest()[:8]}"
    ConfigStore.instance().store(group=group, name=name, node=body, provider=provider)
    return name


def registered_files() -> dict[str, list[str]]:
    """Group → the options that `register_file` made."""
    return {group: list(_registered(group)) for group in ConfigStore.instance().repo}


def _registered(group: str) -> dict[str, str]:
    """Option → provider of the options that `register_file` made."""
    stored = ConfigStore.instance().repo.get(group, {})
    nodes = stored.items() if isinstance(stored, dict) else ()
    return {
        name.removesuffix(".yaml"): node.provider
        for name, node in nodes
        if str(getattr(node, "provider", None)).startswith(_FILE)
    }


def yaml_problem(error: YAMLError) -> str:
    """What is wrong in a YAML file, and in which line."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return first_line(error)
    return f"line {error.problem_mark.line + 1}: {error.problem}"


def check_folder(folder: Path) -> None:
    """Check a folder of the user's own configs.

    Raises:
        UserError: it does not exist, or holds an option that fp4train has, too: one of the two
            would be ignored.
    """
    check_local(folder, "--config-dir")
    if not folder.is_dir():
        raise UserError(f"--config-dir {folder}: there is no such folder")
    ours = own_options()
    theirs = options(folder)
    if not theirs.keys() & ours.keys() and not any(
        [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    ):
        raise UserError(
            f"--config-dir {folder}: it holds no options and no plugins: options are files such as "
            f"{folder / 'recipe' / 'NAME.yaml'}, in folders named {', '.join(sorted(ours))}; a "
            "plugin is a Python module"
        )
    for group, names in theirs.items():
        for name in names:
            if name in ours.get(group, ()):
                raise UserError(
                    f"{folder / group / name}.yaml: fp4train has a {group}={name} already; "
                    "give the file another name"
                )
