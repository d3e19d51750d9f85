"""The tokenizer of a run as `transformers` reads it: `tokenizer.json` and what names its special
tokens.

Training encodes text without special tokens, ends each document with one, and begins it with one
where data.tokenizer.begin_of_document names it. The file adds that one to a text, and loses the
rule that adds others: what is served would differ from what was trained.
"""

import json
from pathlib import Path
from typing import Protocol, cast

from fp4train.config import Config
from fp4train.data.template import ChatTemplate
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


def write_tokenizer(
    folder: Folder, tokenizer: FileTokenizer, *, most: int, template: ChatTemplate | None = None
) -> list[str]:
    """Write the files of a tokenizer; returns what differs from the run's, a sentence each.

    Args:
        most: number of tokens of the longest sequence.
        template: template of conversations.
    """
    begin: str | None = getattr(tokenizer, "begin", None)
    text, notes = _with_additions(tokenizer.to_json(), begin)
    folder.write(TOKENIZER, text.encode())
    special = {"eos_token": tokenizer.end}
    if begin is not None:
        special["bos_token"] = begin
    if template is not None:
        folder.write("chat_template.jinja", template.source.encode())
        named = {name: token for name, token in template.variables.items() if token}
        if (end := named.pop("eos_token", tokenizer.end)) != tokenizer.end:
            if template.trained:
                how = "was trained with"
            else:
                how = "is written for"
            notes.append(
                f"The chat template {how} the eos_token `{end}`; here it is `{tokenizer.end}`."
            )
        special = special | named | special
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": most}
    write_json(folder, "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
    write_json(folder, "special_tokens_map.json", special)
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
