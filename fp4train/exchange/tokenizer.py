"""The tokenizer of a run as `transformers` reads it: `tokenizer.json` and what names its special
tokens.

Training encodes text without special tokens, ends each document with one, and begins it with one
where data.tokenizer.begin_of_document names it. The file adds that one to a text, and loses the
rule that adds others: what is served would differ from what was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from fp4train.config import Config
from fp4train.data.template import kept_template
from fp4train.data.tokenizer_settings import SIDES, TOKENS, kept_settings
from fp4train.data.tokenizers import BytePairs, Pretrained
from fp4train.data.tokenizers.json_file import library_errors
from fp4train.data.tokens import Tokenizer
from fp4train.errors import UserError
from fp4train.exchange.folder import write_json
from fp4train.files import Folder
from fp4train.run.record.trust import own_tokenizer

TOKENIZER = "tokenizer.json"


class FileTokenizer(Tokenizer, Protocol):
    """A tokenizer that has a form as a file of the `tokenizers` library."""

    @property
    def end(self) -> str:
        """The token that ends a document."""

    def to_json(self) -> str:
        """The text of the file."""


def stored_tokenizer(config: Config, run: Path) -> FileTokenizer | None:
    """The tokenizer that a run was trained with, as it keeps it; None: its data are token ids, or
    it has no such file.

    Raises:
        UserError: the run has lost its tokenizer.
    """

    def refuse(lost: str) -> None:
        """Refuse a tokenizer without the run's copy: it would be trained anew, or read
        elsewhere.
        """
        if isinstance(getattr(config.data, "tokenizer", None), BytePairs | Pretrained):
            raise UserError(
                f"{run} has lost its {lost}: put it back; another tokenizer may have other ids"
            )

    tokenizer = own_tokenizer(config, run, refuse)
    if hasattr(tokenizer, "to_json") and hasattr(tokenizer, "end"):
        return cast(FileTokenizer, tokenizer)
    return None


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """What an export says of its tokenizer beside the file.

    Args:
        special: special tokens by name.
        sides: the sides on which texts are padded and cut, by name.
        pad: id of the token that pads.
    """

    special: Mapping[str, str]
    sides: Mapping[str, str]
    pad: int | None

    @classmethod
    def of_run(cls, tokenizer: FileTokenizer, run: Path, pad: int | None) -> TokenizerSettings:
        """The tokens of the run, beside those that the folder of its tokenizer named; where none
        pads, the end of a document does.

        A name of a token that the vocabulary lacks is left out: transformers would add a row to it.

        Args:
            pad: id that pads by the settings of generation; None: they name none.
        """
        from tokenizers import Tokenizer as File

        vocabulary = File.from_str(tokenizer.to_json())
        template = kept_template(run)
        kept = kept_settings(run)
        named = {**({} if template is None else template.variables), **kept}
        padding = tokenizer.end if pad is None else vocabulary.id_to_token(pad) or tokenizer.end
        special = {"pad_token": padding} | {
            name: token
            for name in TOKENS
            if (token := named.get(name)) and vocabulary.token_to_id(token) is not None
        }
        special["eos_token"] = tokenizer.end
        begin: str | None = getattr(tokenizer, "begin", None)
        if begin is not None:
            special["bos_token"] = begin
        return cls(
            special=special,
            sides={name: kept[name] for name in SIDES if name in kept},
            pad=vocabulary.token_to_id(special["pad_token"]),
        )


def write_tokenizer(
    folder: Folder, tokenizer: FileTokenizer, settings: TokenizerSettings, run: Path, most: int
) -> list[str]:
    """Write the files of a run's tokenizer; returns what differs from the run's, a sentence each.

    Args:
        most: number of tokens of the longest sequence.
    """
    text, notes = _with_additions(tokenizer.to_json(), getattr(tokenizer, "begin", None))
    folder.write(TOKENIZER, text.encode())
    if (template := kept_template(run)) is not None:
        folder.write("chat_template.jinja", template.source.encode())
        how = "was trained with" if template.trained else "is written for"
        for name in TOKENS:
            theirs, ours = template.variables.get(name), settings.special.get(name)
            if name in template.source and theirs != ours:
                named = f"{name} `{theirs}`" if theirs else f"{name} left empty"
                notes.append(f"The chat template {how} {named}; here it is `{ours}`.")
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **settings.special,
        **settings.sides,
        "model_max_length": most,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder, "tokenizer_config.json", table)
    write_json(folder, "special_tokens_map.json", settings.special)
    return notes


def _with_additions(text: str, begin: str | None) -> tuple[str, list[str]]:
    """The file that adds `begin` to a text and nothing else, and what differs from the run's.

    Args:
        begin: the token that begins a document; None: there is none.
    """
    from tokenizers import Tokenizer as File, processors

    with library_errors("the tokenizer cannot encode the text"):
        file_tokenizer = File.from_str(text)
        added = file_tokenizer.encode("a", add_special_tokens=True).tokens
    plain = file_tokenizer.encode("a", add_special_tokens=False).tokens
    trained = plain if begin is None else [begin, *plain]
    if added == trained:
        return text, []
    rule = None
    if begin is not None:
        pair = f"{begin} $A {begin} $B"
        number = file_tokenizer.token_to_id(begin)
        file_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=pair, special_tokens=[(begin, number)]
        )
        rule = json.loads(file_tokenizer.to_str())["post_processor"]
    written = json.dumps(json.loads(text) | {"post_processor": rule}, ensure_ascii=False)
    if extra := [f"`{token}`" for token in added if token not in trained]:
        return written, [
            f"The run's tokenizer.json adds {', '.join(extra)} to a text. Training did not, "
            "so that rule is left out "
            "here."
        ]
    return written, []
