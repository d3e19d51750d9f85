"""A tokenizer of the `tokenizers` library, and its copy in the run directory.

`RUN/tokenizer.json` is the tokenizer itself, in the library's own format; `RUN/tokenizer_origin.json` says what it was
made from. A run that resumes takes its own copy: no network, no second training, and the same ids whatever has become
of the original.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fp4train import files
from fp4train.data.tokens import Ids
from fp4train.errors import DataError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endofdocument|>", "[EOS]", "[SEP]")


class JsonTokenizer:
    """Wraps a `tokenizers.Tokenizer`; text that spells a special token is encoded as the text it is."""

    def __init__(self, text: str, *, end_of_document: str | None, what: str) -> None:
        import tokenizers

        self._what = what
        with _told(f"{what} is no tokenizer file of the `tokenizers` library"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        candidates = ENDS if end_of_document is None else (end_of_document,)
        end = next((token for token in candidates if token in vocabulary), None)
        if end is None:
            special = [str(token) for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise DataError(
                f"{what} has no token {' or '.join(candidates)} to end a document with. Name one with "
                f"data.tokenizer.end_of_document; its special tokens: {', '.join(special[:8]) or 'none'}"
            )
        self.end_of_document = vocabulary[end]
        self.vocab_size = max(vocabulary.values()) + 1
        self.identity = f"{hashlib.sha256(text.encode()).hexdigest()[:20]} {end}"

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        with _told(f"{self._what} cannot encode the text"):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Make a DataError of what the library raises: plain Exception, and BaseException where it panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise DataError(f"{what}: {error}") from error


LIMIT = 1 << 28
"""Bytes of a tokenizer that are read."""


def run_tokenizer(
    run_dir: Path, origin: str, make: Callable[[], tuple[str, str]], end_of_document: str | None
) -> JsonTokenizer:
    """The run's own tokenizer, or else a new one that is kept with the run.

    Args:
        make: gives the text of a new one, and what errors call it.
    """
    if (text := kept(run_dir, origin)) is not None:
        return JsonTokenizer(text, end_of_document=end_of_document, what=str(run_dir / "tokenizer.json"))
    text, what = make()
    tokenizer = JsonTokenizer(text, end_of_document=end_of_document, what=what)
    keep(run_dir, origin, text)
    return tokenizer


def kept(run_dir: Path, origin: str) -> str | None:
    """The run's own tokenizer, if it has one that was made from `origin`."""
    if not run_dir.is_dir():
        return None
    try:
        with files.Folder.open(run_dir) as folder:
            if any(folder.status(name) is None for name in ("tokenizer.json", "tokenizer_origin.json")):
                return None
            note = json.loads(folder.read("tokenizer_origin.json", LIMIT))
            made_from, checksum = note["origin"], note.get("sha256")
            data = folder.read("tokenizer.json", LIMIT)
        text = data.decode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"the run's tokenizer in {run_dir} cannot be read: {error}. Use another run.name.") from error
    if checksum not in (None, hashlib.sha256(data).hexdigest()):
        raise DataError(f"the run's tokenizer in {run_dir} is damaged (its checksum differs). Use another run.name.")
    if made_from != origin:
        raise DataError(f"{run_dir} holds the tokenizer {made_from}, not {origin}. Use another run.name.")
    return text


def keep(run_dir: Path, origin: str, text: str) -> None:
    """Keep the tokenizer with the run, each file whole or not at all."""
    note = {"origin": origin, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    try:
        with files.Folder.open(run_dir, create=True) as folder:
            folder.write("tokenizer_origin.json", json.dumps(note).encode())
            folder.write("tokenizer.json", text.encode())
    except OSError as error:
        raise DataError(f"the tokenizer cannot be kept in {run_dir}: {error.strerror or error}") from error
