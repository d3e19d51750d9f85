"""JSON that somebody else wrote, read within bounds: a small file costs neither minutes nor
gigabytes.

The length of a text bounds neither the number of its values nor their nesting: `[[],[],…` of 64 MB
becomes 2 GB of lists, and lists in lists exhaust the interpreter's stack where they are printed. So
the marks of a text are counted before it is read, and its nesting before the value is used.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

VALUES = 1 << 22
"""Values of a text, at most: a table of 200,000 tensors has half of them."""
DEPTH = 64
"""Tables and lists that may lie in one another."""
_MARKS = (b",", b":", b"[", b"{")


def parse(text: bytes) -> Any:
    """The value that a JSON text stands for.

    Raises:
        ValueError: it is no JSON, has more than about `VALUES` values, nests them deeper than
            `DEPTH`, or has an integer of thousands of digits.
    """
    marks = sum(map(text.count, _MARKS))
    if marks > VALUES:
        raise ValueError(f"it has some {marks:,} values; more than {VALUES:,} are not read")
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # the other error of a decoder
        most = sys.get_int_max_str_digits()
        raise ValueError(f"it has an integer of more than {most:,} digits") from None
    _check_depth(parsed)
    return parsed


_TOO_DEEP = f"its values are nested deeper than {DEPTH} times"


def _check_depth(parsed: Any) -> None:
    """Raises ValueError where values are nested too deeply."""
    level = [parsed]
    for _ in range(DEPTH):
        level = [
            value
            for parent in level
            for value in _values_in(parent)
            if isinstance(value, dict | list)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _values_in(parent: Any) -> Iterable[Any]:
    """The values of a table or list; none of another value."""
    if isinstance(parent, dict):
        return parent.values()
    if isinstance(parent, list):
        return parent
    return ()
