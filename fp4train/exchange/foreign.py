"""Files of a folder that an export does not write.

What lies beside the weights decides, too, what other software serves: an adapter is added to them,
a second file of weights is taken in their place, the older form of a tokenizer before its newer
one.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from fp4train.checkpoint.model_folder import CONFIG, INDEX, WEIGHTS
from fp4train.errors import user_errors
from fp4train.files import Folder
from fp4train.text import printable

SETTINGS = (CONFIG, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
"""Tables of which every key counts: an added one changes what a text becomes, what is computed, or
what follows it, in one software or another.
"""
UNREAD = ("transformers_version", "use_cache", "_name_or_path")
"""Keys that may be added to them: transformers writes them itself, and no number depends on
them.
"""
_MOST = 100
"""So many files are named."""
_KINDS = (
    (r"adapter_.*|.*lora.*", "transformers with peft adds an adapter to the weights"),
    (r".*\.py", "code, which some software runs"),
    (
        r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|npz)",
        "weights, which other software may load instead",
    ),
    (r".*\.index\.json|params\.json|consolidated.*", "says which weights are loaded"),
    (
        r"vocab\..*|merges\.txt|.*\.model|added_tokens\.json|tokenizer.*|tekken\.json|.*\.tiktoken",
        "a tokenizer, which other software may load instead",
    ),
    (
        r"chat_template.*|.*\.jinja|additional_chat_templates",
        "a chat template, which other software may render with",
    ),
    (
        r"(.*_)?config\.json|generation.*|preprocessor.*|processor.*",
        "a configuration, which other software may read",
    ),
)
"""Pattern of names → what such a file does."""


def foreign_files(folder: Path, written: Collection[str]) -> Iterator[str]:
    """A sentence for each thing in `folder` whose name is none of `written`.

    Args:
        written: names that an export writes, and those of the files that its index names.

    Raises:
        UserError: the folder cannot be read.
    """
    expected = set(written)
    if WEIGHTS not in written:
        expected.add(INDEX)
    with user_errors(OSError, before=f"{folder}: "), Folder.open(folder) as opened:
        strange = [name for name in opened.names() if name not in expected]
        for name in strange[:_MOST]:
            kind = "folder" if opened.has_folder(name) else "file"
            does = next(
                (does for pattern, does in _KINDS if re.fullmatch(pattern, name.lower())), None
            )
            more = f": {does}" if does else ""
            yield f"{printable(name)}: the export wrote no such {kind}{more}"
    if len(strange) > _MOST:
        yield f"and {len(strange) - _MOST:,} more files and folders that the export did not write"
