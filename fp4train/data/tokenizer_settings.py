"""What a folder says of its tokenizer beside `tokenizer.json`: the names of special tokens, and the
side on which texts are padded and cut.

Training asks for none of it. A run keeps it, so that its exports say it again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4train import files
from fp4train.errors import DataError, data_errors, in_words, reason
from fp4train.text import first_line

KEPT = "tokenizer_settings.json"
"""The copy in a run's directory."""
SETTINGS = "tokenizer_config.json"
TOKENS_MAP = "special_tokens_map.json"
TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""The special tokens that have a name, which a chat template may use."""
SIDES = ("padding_side", "truncation_side")
_LIMIT = 1 << 24
"""Bytes of a table: one that lists thousands of added tokens has more than 1 MB."""


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a tokenizer's folder, with the special tokens that another file names.

    Raises:
        DataError: a file cannot be read, or is no table.
    """
    return _table(folder / TOKENS_MAP) | _table(folder / SETTINGS)


def texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name, and the sides, of those that settings have."""
    found = {}
    for name in (*TOKENS, *SIDES):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def keep_settings(folder: Path, run: Path) -> None:
    """Keep what a tokenizer's folder says with a run.

    Raises:
        DataError: a file cannot be read or written.
    """
    kept = json.dumps(texts(read_settings(folder)))
    with data_errors(OSError, before=f"{KEPT} cannot be kept in {run}: ", message=reason):
        files.write(run / KEPT, kept.encode(), create=True)


def kept_settings(run: Path) -> dict[str, str]:
    """What a run keeps; empty where its tokenizer came without settings.

    Raises:
        DataError: the file is damaged.
    """
    path = run / KEPT
    try:
        return texts(json.loads(files.read(path, _LIMIT)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {in_words(error, str(path))}. Put it back, or remove it"
        ) from error


def _table(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with data_errors(OSError, ValueError, before=f"{path} cannot be read: "):
        text = files.read(path.resolve(), _LIMIT).decode()
    refused = f"{path} is no JSON table: "
    with data_errors(ValueError, TypeError, RecursionError, before=refused, message=first_line):
        return dict(json.loads(text))
