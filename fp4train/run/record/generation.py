"""How text of a run's model ends and is drawn, as the Hugging Face folder says that the run began
with.

A tuned model ends its answers with other ids than documents end with, and its folder says with
which probabilities it draws. A run learns none of that and its export says it again: so it is kept
beside the run's tokenizer.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4train import files, foreign_json
from fp4train.checkpoint.model_folder import CONFIG, has_file, read_config, read_table
from fp4train.data.tokenizers import Pretrained
from fp4train.errors import UserError, in_words, user_errors
from fp4train.files import Folder
from fp4train.text import shortened

GENERATION = "generation.json"
"""The file of a run's directory."""
SETTINGS = "generation_config.json"
"""The file of a folder."""
_END = "eos_token_id"
_PAD = "pad_token_id"
_LIMIT = 1 << 20
_MOST = 64
_OF_THE_WRITER = ("_from_model_config", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """The end ids and settings of a folder.

    Args:
        ends: the ids of its `config.json` that end a text.
        settings: its `generation_config.json`.
    """

    ends: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def ends_of_model(self, ends: list[int]) -> int | list[int] | None:
        """What `config.json` of an export has, whose texts end with `ends`."""
        return _joined([*self.ends, *ends])

    @property
    def pad(self) -> int | None:
        """The id that pads a text."""
        pad = self.settings.get(_PAD)
        return pad if type(pad) is int else None

    def settings_of_model(self, ends: list[int], pad: int | None) -> dict[str, Any]:
        """What `generation_config.json` of an export has, whose texts end with `ends`.

        Args:
            pad: the id with which its tokenizer pads, where the folder named none.
        """
        named = _ids(self.settings, SETTINGS) or self.ends
        padding = pad if self.pad is None else self.pad
        return {**self.settings, _END: _joined([*named, *ends]), _PAD: padding}


def belongs_to(folder: Path, tokenizer: object) -> bool:
    """Whether ids of a run with these settings of its tokenizer are those of the folder; None: its
    data are ids.
    """
    if tokenizer is None:
        return True
    return isinstance(tokenizer, Pretrained) and Path(tokenizer.name).resolve() == folder.resolve()


def keep_generation(folder: Path, run: Path) -> None:
    """Write into a run's directory what a folder says of the text of its model.

    Raises:
        UserError: the folder's tables cannot be read, or name no ids.
    """
    config = read_config(folder)
    if has_file(folder, SETTINGS):
        settings = read_table(folder, SETTINGS)
    else:
        settings = {}
    settings = {key: value for key, value in settings.items() if key not in _OF_THE_WRITER}
    with user_errors(ValueError, before=f"{folder}: "):
        rows = config.get("vocab_size")
        for ids, name in ((_ids(config, CONFIG), CONFIG), (_ids(settings, SETTINGS), SETTINGS)):
            if strange := [token for token in ids if isinstance(rows, int) and token >= rows]:
                raise ValueError(
                    f"{_END} of {name} has {strange[0]}, which is no id of a vocabulary of {rows}"
                )
        kept = json.dumps({"ends": _ids(config, CONFIG), "settings": settings}).encode()
        if len(kept) > _LIMIT:
            raise ValueError(
                f"{SETTINGS} has {len(kept):,} bytes; more than {_LIMIT:,} are not kept"
            )
    with (
        user_errors(OSError, before=f"{GENERATION} cannot be kept in {run}: "),
        Folder.open(run, create=True) as place,
    ):
        place.write(GENERATION, kept)


def kept_generation(run: Path) -> GenerationSettings:
    """What a run keeps of the folder that it began with; empty where it began with none.

    Raises:
        UserError: the file is damaged.
    """
    try:
        body = foreign_json.parse(files.read(run / GENERATION, _LIMIT))
        settings = GenerationSettings(
            ends=_ids({_END: body["ends"]}, GENERATION), settings=dict(body["settings"])
        )
        _ids(settings.settings, GENERATION)
    except FileNotFoundError:
        return GenerationSettings()
    except (OSError, ValueError, LookupError, TypeError) as error:
        path = run / GENERATION
        raise UserError(
            f"{path} cannot be read: {in_words(error, str(path))}. Put it back, or remove it"
        ) from error
    return settings


def _ids(table: dict[str, Any], name: str) -> list[int]:
    """The ids that end a text, by a table of the file `name`."""
    value = table.get(_END)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MOST or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError(
            f"{_END}={shortened(repr(value), 80)} of {name} must be an id or up to {_MOST} ids"
        )
    return ids


def _joined(ids: list[int]) -> int | list[int] | None:
    """The ids, each once; one alone, as most folders have it."""
    ids = list(dict.fromkeys(ids))
    return ids if len(ids) > 1 else ids[0] if ids else None
