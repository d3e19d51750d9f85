"""fp4train formats [plugins=[NAME]] [--config-dir FOLDER]

The number formats as a table, and the roundings. Formats of plugins stand after the program's own.

  plugins=[NAME]   packages that add formats of your own; --config-dir FOLDER: where they are
"""

from fp4train.cli.output import terminal_width, usage
from fp4train.config import overrides, plugins
from fp4train.errors import UserError
from fp4train.formats import formats_table
from fp4train.quantize import ROUNDINGS
from fp4train.text import tabulate

USAGE = usage(__doc__)


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit code."""
    flags, words = overrides.flags_and_words(arguments)
    if strange := overrides.other_flags(flags):
        raise UserError(f"formats knows no flag {strange[0]}: {USAGE}")
    if strange := [word for word in words if not word.startswith("plugins=")]:
        raise UserError(f"formats takes plugins=[…] only, not {' '.join(strange)}: {USAGE}")
    with plugins.using(overrides.plugins(words), overrides.own_folders(flags)):
        print(_screen())
    return 0


def _screen() -> str:
    header = ("format", "bits", "largest", "smallest normal", "smallest", "binades", "specials")
    rows = [
        (
            row.name,
            str(row.bits),
            f"{row.largest:.6g}",
            f"{row.smallest_normal:.3g}",
            f"{row.smallest:.3g}",
            f"{row.binades:.1f}",
            row.specials,
        )
        for row in formats_table()
    ]
    table = tabulate([header, *rows], width=terminal_width())
    return "\n".join([*table, "", f"roundings: {', '.join(ROUNDINGS.names)}"])
