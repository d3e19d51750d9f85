"""fp4train formats [plugins=[NAME]] [--config-dir FOLDER]

The number formats as a table, and the roundings. Formats of plugins stand after the program's own.

  plugins=[NAME]   packages that add formats of your own; --config-dir FOLDER: where they are
"""

from fp4train.cli.output import print_screen, usage
from fp4train.config import overrides, plugins
from fp4train.errors import UserError
from fp4train.formats import formats_table
from fp4train.quantize import ROUNDINGS
from fp4train.quantize.outer import GLOBAL_SCALES
from fp4train.quantize.rounding import FEW_BITS

USAGE = usage(__doc__)


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit code."""
    line = overrides.read_options(arguments, {})
    line.check_flags(USAGE)
    if strange := [word for word in line.words if not word.startswith("plugins=")]:
        raise UserError(f"formats takes plugins=[…] only, not {' '.join(strange)}: {USAGE}")
    with plugins.using(overrides.plugins(line.words), overrides.own_folders(line.flags)):
        print_screen(
            "formats.txt",
            formats=formats_table(),
            roundings=_roundings(),
            global_scales=[*filter(None, GLOBAL_SCALES), "[rows, columns]"],
        )
    return 0


def _roundings() -> list[str]:
    """The names of the roundings; those by a number of random bits in one entry."""
    numbered = f"{FEW_BITS[0].name} to {FEW_BITS[-1].name}"
    names = [numbered if rounding in FEW_BITS else rounding.name for rounding in ROUNDINGS]
    return list(dict.fromkeys(names))
