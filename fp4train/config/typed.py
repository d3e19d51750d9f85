"""Texts as they are typed, where Hydra's grammar or YAML reads something else: 3.10, 1e5, 2026_11,
true. The classes of a configuration say which of its keys take text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from hydra.core.override_parser.types import Override

from fp4train.config.binding import hint_of, is_sequence, sections_of, types_of
from fp4train.config.plugins import below
from fp4train.config.schema import Config

_ITEM = re.compile(
    r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|[^,])+"""
)


def typed(word: Override) -> str:
    """What stands behind the = of a word."""
    return str(word.input_line).partition("=")[2].strip()


def items(text: str) -> list[str]:
    """The values of a list or a sweep, as they are typed."""
    if text.startswith("choice("):
        text = text.removeprefix("choice(").removesuffix(")")
    return [item[0].strip() for item in _ITEM.finditer(text)]


def typed_texts(words: Iterable[Override], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(Key, value as it is typed) of the words whose keys take text, and whose values Hydra reads
    as something else.

    Args:
        values: plain configuration, whose classes say what the keys take.
    """
    for word in words:
        if word.is_delete() or word.is_sweep_override():
            continue
        value = word.value()
        if isinstance(value, str | dict):
            continue
        hint = hint_of(word.key_or_group, values, Config)
        if not isinstance(value, list):
            text = _text(value, typed(word), hint)
        else:
            texts = items(typed(word)[1:-1])
            kinds = [get_args(option)[0] for option in types_of(hint) if is_sequence(option)]
            if not kinds or len(texts) != len(value):
                continue
            text = [_text(*pair, kinds[0]) for pair in zip(value, texts, strict=True)]
        if text is not value:
            yield word.key_or_group, text


def _text(value: Any, text: str, hint: Any) -> Any:
    """`text` where text is needed and `value` is what Hydra reads in it; 1000 for 1e3 where a whole
    number is needed.
    """
    kinds = types_of(hint)
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        return int(value)
    return text if _is_lost(value, hint) and text != "null" else value


def lost_texts(node: Any, hint: Any = Config, key: str = "") -> Iterator[tuple[str, Any]]:
    """(Full key, value) of the numbers and truth values below `node` where text is needed: YAML has
    read them, and does not say how they were written.
    """
    if isinstance(node, Mapping):
        for name, value, needed in sections_of(node, hint):
            yield from lost_texts(value, needed, below(key, name))
    elif isinstance(node, list):
        for option in filter(is_sequence, types_of(hint)):
            for item in node:
                yield from lost_texts(item, get_args(option)[0], key)
    elif isinstance(node, int | float) and _is_lost(node, hint):
        yield key, node


def _is_lost(value: Any, hint: Any) -> bool:
    """Whether a value stands for a text that is needed."""
    options = types_of(hint)
    return type(value) not in (str, *options) and (str in options or Path in options)
