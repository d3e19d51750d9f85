"""fp4train formats

The number formats as a table.
"""

from fp4train.cli.output import terminal_width
from fp4train.errors import UserError
from fp4train.formats import formats_table
from fp4train.text import tabulate


def main(arguments: list[str]) -> int:
    """Print the table; returns the exit code."""
    if arguments:
        raise UserError(f"formats takes no arguments, not {' '.join(arguments)}")
    header = ("format", "bits", "largest", "smallest normal", "smallest", "binades", "specials")
    rows = [
        (
            name,
            str(bits),
            f"{largest:.6g}",
            f"{normal:.3g}",
            f"{smallest:.3g}",
            f"{binades:.1f}",
            specials,
        )
        for name, bits, largest, normal, smallest, binades, specials in formats_table()
    ]
    print("\n".join(tabulate([header, *rows], width=terminal_width())))
    return 0
