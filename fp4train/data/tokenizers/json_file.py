"""A tokenizer of the `tokenizers` library, and its copy in the run directory.

`RUN/tokenizer.json` is the tokenizer itself, in the library's own format;
`RUN/tokenizer_origin.json` says what it was made from. A run that resumes takes its own copy: no
network, no second training, and the same ids whatever has become of the original.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fp4train import files
from fp4train.data.encoding import Encoded
from fp4train.data.tokens import Ids
from fp4train.errors import DataError, data_errors, reason
from fp4train.text import shortened

ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|endofdocument|>",
    "[EOS]",
    "[SEP]",
    "<|end|>",  # of exported byte tokens
)

LIMIT = 1 << 26
"""Bytes of a tokenizer file that are read; the largest that are published have 35 MB."""
MESSAGE = 400
"""Characters of an error of the library that are shown: it quotes what stands in the file."""
_SAMPLE = 'def Add(a, b):\n    return a + b  # "Sum"\n'


class JsonTokenizer:
    """Wraps a `tokenizers.Tokenizer`; text that spells a special token is encoded as the text it
    is.
    """

    def __init__(
        self,
        text: str,
        *,
        end_of_document: str | None,
        what: str,
        begin_of_document: str | None = None,
    ) -> None:
        import tokenizers

        self._what = what
        self._text = text
        with library_errors(f"{what} is no tokenizer file of the `tokenizers` library"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.splits_words = isinstance(self._tokenizer.model, tokenizers.models.BPE)
        if self.splits_words:
            self._tokenizer.model.dropout = None  # equal text has equal ids
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        candidates = ENDS if end_of_document is None else (end_of_document,)
        end = next((token for token in candidates if token in vocabulary), None)
        if end is None:
            raise DataError(
                f"{what} has no token {' or '.join(candidates)} to end a document with. Name "
                f"one with data.tokenizer.end_of_document; {self._listed_special()}"
            )
        self.end = end
        self.end_of_document = vocabulary[end]
        self.begin = begin_of_document
        self.begin_of_document: int | None = None
        self.identity = f"{hashlib.sha256(text.encode()).hexdigest()[:20]} {end}"
        if begin_of_document is not None:
            self.begin_of_document = self._begin_id(begin_of_document, vocabulary)
            self.identity += f" after {begin_of_document}"
        self.vocab_size = max(vocabulary.values()) + 1

    def _begin_id(self, begin: str, vocabulary: Mapping[str, int]) -> int:
        """The id that begins a document."""
        if begin == self.end:
            raise DataError(
                f"data.tokenizer.begin_of_document={begin} ends each document already: what "
                "comes before the next one "
                "is that token. Leave it out"
            )
        if begin not in vocabulary:
            raise DataError(
                f"{self._what} has no token {begin} to begin a document with "
                f"(data.tokenizer.begin_of_document); {self._listed_special()}"
            )
        return vocabulary[begin]

    def _listed_special(self) -> str:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return f"its special tokens: {', '.join(map(str, list(added)[:8])) or 'none'}"

    @property
    def token_before_texts(self) -> str | None:
        """The token that the file puts before a text, and nothing else; None: it puts none, or
        more.
        """
        with library_errors(f"{self._what} cannot encode the text"):
            added, plain = (
                self._tokenizer.encode("a", add_special_tokens=adds).tokens
                for adds in (True, False)
            )
        return str(added[0]) if added[1:] == plain else None

    def to_json(self) -> str:
        """The file that it was made from."""
        return self._text

    def token_bytes(self) -> Ids:
        """Bytes that each id stands for, int64 [vocab_size]; 0 for special tokens, and for ids that
        there are not.

        A byte-level tokenizer spells each byte as a character; others spell a byte that is no
        character <0xE2>.
        """
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        byte_level = "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        anchor = self.encode("a")
        with library_errors(f"{self._what} cannot decode ids"):
            anchor_size = len(self._decoded(anchor).encode())
            for text, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
                if number in added:
                    sizes[number] = 0 if added[number].special else len(text.encode())
                elif byte_level:
                    sizes[number] = len(text)
                elif re.fullmatch(r"<0x[0-9A-F]{2}>", text):
                    sizes[number] = 1
                else:
                    sizes[number] = len(self._decoded([*anchor, number]).encode()) - anchor_size
        return sizes

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        with library_errors(f"{self._what} cannot encode the text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_spans(self, texts: Sequence[str]) -> list[Encoded]:
        """As `encode_batch`, with the characters that each id stands for."""
        with library_errors(f"{self._what} cannot encode the text"):
            return [
                _encoded(encoding)
                for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
            ]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def lost_text(self) -> str | None:
        """A line of text with capitals, spaces and line breaks, as it comes back from encoding and
        decoding; None: all of it is kept.
        """
        decoded = self.decode(self.encode(_SAMPLE))
        return None if decoded == _SAMPLE else decoded

    @property
    def special_tokens(self) -> list[str]:
        """The texts that `encode_markup` makes one token of, and `encode` does not."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [str(token.content) for token in added if token.special]

    def encode_markup(self, text: str) -> Encoded:
        """The ids of a text whose special tokens are meant as such."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode_spans([text])[0]
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors(f"{self._what} cannot decode ids"):
            return self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _encoded(encoding: Any) -> Encoded:
    """The arrays of an `Encoding` of the library."""
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
    begins = np.diff(words, prepend=-2) != 0
    return Encoded(np.array(encoding.ids, dtype=np.uint32), offsets[:, 0], offsets[:, 1], begins)


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Make a DataError of what the library raises: plain Exception, and BaseException where it
    panics.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise DataError(f"{what}: {shortened(str(error), MESSAGE)}") from error


def run_tokenizer(
    run_dir: Path,
    origin: str,
    make: Callable[[], tuple[str, str]],
    end_of_document: str | None,
    begin_of_document: str | None = None,
) -> JsonTokenizer:
    """The run's own tokenizer, or else a new one that is kept with the run.

    Args:
        make: function that gives the text of a new one, and its name in errors.
    """
    opened = partial(
        JsonTokenizer, end_of_document=end_of_document, begin_of_document=begin_of_document
    )
    if (text := kept(run_dir, origin)) is not None:
        return opened(text, what=str(run_dir / "tokenizer.json"))
    text, what = make()
    tokenizer = opened(text, what=what)
    keep(run_dir, origin, text)
    return tokenizer


def keeps_tokenizer(run_dir: Path) -> bool:
    """Whether the run has a tokenizer of its own."""
    return all((run_dir / name).exists() for name in ("tokenizer.json", "tokenizer_origin.json"))


def kept(run_dir: Path, origin: str) -> str | None:
    """The run's own tokenizer, if it has one that was made from `origin`."""
    if not run_dir.is_dir():
        return None
    strange = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    remedy = ". Use another run.name."
    refused = data_errors(
        *strange, before=f"the run's tokenizer in {run_dir} cannot be read: ", after=remedy
    )
    with refused, files.Folder.open(run_dir) as folder:
        if any(folder.status(name) is None for name in ("tokenizer.json", "tokenizer_origin.json")):
            return None
        note = json.loads(folder.read("tokenizer_origin.json", LIMIT))
        made_from = note["origin"]
        checksum = note.get("sha256")
        data = folder.read("tokenizer.json", LIMIT)
        text = data.decode()
    if checksum not in (None, hashlib.sha256(data).hexdigest()):
        raise DataError(
            f"the run's tokenizer in {run_dir} is damaged (its checksum differs){remedy}"
        )
    if made_from != origin:
        raise DataError(f"{run_dir} holds the tokenizer {made_from}, not {origin}{remedy}")
    return text


def keep(run_dir: Path, origin: str, text: str) -> None:
    """Keep the tokenizer with the run, each file whole or not at all."""
    note = {"origin": origin, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    refused = data_errors(
        OSError, before=f"the tokenizer cannot be kept in {run_dir}: ", message=reason
    )
    with refused, files.Folder.open(run_dir, create=True) as folder:
        folder.write("tokenizer_origin.json", json.dumps(note).encode())
        folder.write("tokenizer.json", text.encode())
