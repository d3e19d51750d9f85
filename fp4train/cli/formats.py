"""fp4train formats [plugins=[NAME]] [--config-dir FOLDER]

The number formats as a table, the roundings and the transforms. Those of
plugins stand after the program's own.

  plugins=[NAME]   packages that add formats of your own; --config-dir FOLDER:
                   where they are
"""

import inspect
import sys
from collections.abc import Iterator

from fp4train.cli.output import print_screen
from fp4train.config import plugins
from fp4train.config.command_line import CommandLine, read_line
from fp4train.errors import UserError
from fp4train.formats import formats_table
from fp4train.quantize import ROUNDINGS, Transform
from fp4train.quantize.outer import GLOBAL_SCALES
from fp4train.quantize.rounding import FEW_BITS

TRANSFORMS = ("fp4train.quantize.Hadamard", "fp4train.quantize.Rotation")
"""The program's own, as `_target_` names them."""


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit code."""
    line = read_line(arguments, CommandLine, __doc__, keys=("plugins",))
    if line.runs:
        raise UserError(f"formats takes plugins=[…] only, not {line.runs[0]}: {line.usage}")
    with line.using_plugins():
        print_screen(
            "formats.txt",
            formats=formats_table(),
            roundings=_roundings(),
            transforms=[*TRANSFORMS, *_transforms_of_plugins()],
            global_scales=[*filter(None, GLOBAL_SCALES), "[rows, columns]"],
        )
    return 0


def _roundings() -> list[str]:
    """The names of the roundings; those by a number of random bits in one entry."""
    numbered = f"{FEW_BITS[0].name} to {FEW_BITS[-1].name}"
    names = [numbered if rounding in FEW_BITS else rounding.name for rounding in ROUNDINGS]
    return list(dict.fromkeys(names))


def _transforms_of_plugins() -> list[str]:
    """The classes of transforms that the plugins define, as `_target_` names them."""
    packages = {name.partition(".")[0] for name in plugins.named()}
    names = []
    for transform in _subclasses(Transform):
        module = transform.__module__
        name = transform.__qualname__
        # another import of the module may have left a class of that name behind
        current = getattr(sys.modules.get(module), name, None) is transform
        if module.partition(".")[0] in packages and current and not inspect.isabstract(transform):
            names.append(f"{module}.{name}")
    return names


def _subclasses(base: type) -> Iterator[type]:
    """The classes that derive from `base`, at any distance."""
    derived: type
    for derived in base.__subclasses__():
        yield derived
        yield from _subclasses(derived)
