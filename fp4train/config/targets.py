"""Which classes a configuration may name by `_target_`.

Dataclasses that are defined in fp4train, or in a plugin that the command line names (see `plugins`); no other module is
imported. The class's defining module is checked and not only its name, because attributes lead anywhere:
"fp4train.files.os.system". A configuration found in a run directory is therefore data: building a dataclass
of ours stores values, and foreign code does not run.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from fp4train.config import plugins
from fp4train.errors import UserError
from fp4train.text import near_miss


def check_targets(node: Any, path: str = "") -> None:
    """Raise UserError if a `_target_` in a configuration is not a configuration class (see `own_class`)."""
    for where, target in _targets(node, path):
        own_class(target, where)


def own_class(target: object, where: str) -> type:
    """The configuration class that `target` names: a dataclass defined in fp4train or in a named plugin.

    Args:
        target: "module.Class".
        where: the full key of `target`, for error messages.

    Raises:
        UserError: it names something else.
    """
    module, _, name = str(target).rpartition(".")
    package = module.partition(".")[0]
    if not plugins.may_define(module):
        hint = f"; if you trust the package {package}, add plugins=[{package}]" if package.isidentifier() else ""
        raise UserError(f"{where}={target!r} is no configuration class of fp4train{hint}")
    refused = f"{where}={target!r} is no configuration class of {package}"
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{refused}: there is no module {error.name}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{refused}: {module} cannot be imported: {plugins.describe_failure(error)}") from error
    found = getattr(holder, name, None)
    if found is None:
        classes = [each for each, value in vars(holder).items() if dataclasses.is_dataclass(value)]
        raise UserError(f"{refused}: {module} has no {name}{near_miss(name, classes)}")
    if not isinstance(found, type) or not plugins.may_define(found.__module__):
        raise UserError(refused)
    if "__dataclass_fields__" not in vars(found):
        raise UserError(f"{refused}: it is no dataclass; decorate it with @dataclass(frozen=True, kw_only=True)")
    return found


def _targets(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            where = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                yield where, value
            else:
                yield from _targets(value, where)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}[{index}]")
