"""Bounds on a tokenizer file that somebody else wrote: what it may cost to read it and to encode
with it.

A tokenizer.json of a few lines can make gigabytes of a short text: each `Replace` of its normalizer
may write a longer text for a shorter one, and the next reads what it wrote. The growth of a text is
at most the product of the growths of all steps, and tokenizers that are in use stay below three.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fp4train.errors import DataError, data_errors
from fp4train.text import first_line

LIMIT = 1 << 26
"""Bytes of a tokenizer file that are read; the largest that are published have 35 MB."""
BRACKETS = 1 << 22
"""Lists and tables that such a file may hold; one with a million merges has a million."""
GROWTH = 64.0
"""Characters that a normalizer or decoder may make of one."""
ADDED = 1 << 10
"""Tokens that a post-processor may add to a text; those in use add up to three."""
IDS = 1 << 24
"""Token ids: a larger one would ask for an embedding of more than 16 million rows."""


def check_file(text: str, what: str) -> dict[str, Any]:
    """The table that a tokenizer file holds.

    Raises:
        DataError: it holds none, or one that makes far more of a text than it is given.
    """
    strange = f"{what} is no tokenizer file of the `tokenizers` library"
    if (brackets := text.count("[") + text.count("{")) > BRACKETS:
        raise DataError(f"{what} holds {brackets:,} lists and tables; up to {BRACKETS:,} are read")
    refused = f"{strange}; it is no JSON file: "
    with data_errors(ValueError, RecursionError, before=refused, message=first_line):
        table = json.loads(text)
    if not isinstance(table, dict):
        raise DataError(f"{strange}: it holds a {type(table).__name__}")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        with data_errors(RecursionError, before=f"{what}: its {part} is nested too deeply: "):
            growth, longest = _growth(_steps(table.get(part)))
        if growth > GROWTH:
            raise DataError(
                f"{what}: its {part} may make {growth:,.0f} characters of one "
                f"({longest[:60]}); up to {GROWTH:.0f} are "
                "allowed. It is no tokenizer of a model that is in use: take another one"
            )
    return table


def check_added(tokenizer: Any, what: str) -> None:
    """Raises DataError where a `tokenizers.Tokenizer` adds far more tokens to a text than those in
    use.
    """
    added = max(tokenizer.num_special_tokens_to_add(is_pair) for is_pair in (False, True))
    if added > ADDED:
        raise DataError(
            f"{what}: its post_processor adds {added:,} tokens to a text; up to {ADDED:,} are "
            "allowed"
        )


def check_ids(highest: int, what: str) -> None:
    """Raises DataError where an id would need an enormous embedding."""
    if highest >= IDS:
        raise DataError(f"{what} has the token id {highest:,}; ids below {IDS:,} are possible")


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The parts that a normalizer, pre-tokenizer or decoder consists of, in order."""
    if not isinstance(part, Mapping):
        return
    inner = next(
        (part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), None
    )
    if isinstance(inner, list):
        for step in inner:
            yield from _steps(step)
    else:
        yield part


def _growth(steps: Iterator[Mapping[str, Any]]) -> tuple[float, str]:
    """(Characters that are made of one at most, the step that makes the most)."""
    total = most = 1.0
    longest = ""
    for step in steps:
        growth = _growth_of(step)
        total *= growth
        if growth > most:
            most = growth
            longest = (
                f"{step.get('type')} "
                f"{json.dumps(step.get('pattern') or step.get('prepend'), ensure_ascii=False)}"
            )
    return total, longest


def _growth_of(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        content = len(str(step.get("content", "")))
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping):
            plain = pattern.get("String")
        else:
            plain = None
        if isinstance(plain, str) and plain:
            return max(1.0, content / len(plain))
        return 1.0 + content  # an expression may match nothing, before each character
    if kind == "Prepend":
        return max(1.0, float(len(str(step.get("prepend", "")))))
    if kind == "Precompiled":
        return _longest_of_charsmap(step.get("precompiled_charsmap"))
    return 1.0


def _longest_of_charsmap(encoded: Any) -> float:
    """Characters of the longest text that SentencePiece's table of normalisations writes.

    It holds the size of a trie in bytes (32 bits, low byte first), the trie, and texts that end
    with NUL.
    """
    if not isinstance(encoded, str):
        return 1.0
    try:
        data = base64.b64decode(encoded)
    except ValueError:  # the library says so
        return 1.0
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return float(
        max((len(text.decode(errors="replace")) for text in re.split(rb"\0", texts)), default=1)
        or 1
    )
