"""Small tokenizers of every kind that models have, trained on the source of a module."""

import inspect
import json
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from fp4train.data.tokenizers import JsonTokenizer

TEXT = inspect.getsource(textwrap) * 2
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
DIGITS_FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)|[^\d\s]+|\s+(?!\S)|\s+"


def _byte_level(pre_tokenizer: Any = None, **added: dict[str, Any]) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer is None)
    parts = [byte_level] if pre_tokenizer is None else [pre_tokenizer, byte_level]
    return _bpe(
        pre_tokenizer=pre_tokenizers.Sequence(parts), decoder=decoders.ByteLevel(), added=added
    )


def _bpe(
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    decoder: Any = None,
    byte_fallback: bool = False,
    added: dict[str, dict[str, Any]] | None = None,
) -> Tokenizer:
    made = Tokenizer(
        models.BPE(byte_fallback=byte_fallback, fuse_unk=byte_fallback, unk_token="<unk>")
    )
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        made.decoder = decoder
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=650,
        special_tokens=["</s>", "<unk>", *fallback],
        initial_alphabet=[] if byte_fallback else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    table = json.loads(made.to_str())
    table["added_tokens"] = [
        token for token in table["added_tokens"] if token["content"] not in fallback
    ]
    made = Tokenizer.from_str(json.dumps(table))
    made.add_tokens([AddedToken(text, special=False, **how) for text, how in (added or {}).items()])
    return made


def _sentencepiece(scheme: str | None, *, split: bool, **added: dict[str, Any]) -> Tokenizer:
    """Llama's kinds; `scheme` None: ▁ is put before a text by the normalizer."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if scheme is None:
        prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        return _bpe(normalizer=prepend, decoder=decoder, byte_fallback=True, added=added)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    return _bpe(
        pre_tokenizer=metaspace,
        decoder=decoders.Sequence([*steps, *strip]),
        byte_fallback=True,
        added=added,
    )


def _gemma() -> Tokenizer:
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return _bpe(
        normalizer=normalizers.Replace(" ", "▁"),
        pre_tokenizer=split,
        decoder=decoder,
        byte_fallback=True,
    )


def _unigram(*, split: bool) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(split=split), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return made


def _word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["[UNK]", "</s>"], show_progress=False
    )
    made.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return made


def _clip() -> Tokenizer:
    made = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    made.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "</s>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return made


ADDED: dict[str, dict[str, Any]] = {
    "<think>": {"rstrip": True},
    "return": {"single_word": True},
    "    ": {},
    "\n\n": {"lstrip": True},
}

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "byte level, Llama 3": lambda: _byte_level(pre_tokenizers.Split(Regex(LLAMA_3), "isolated")),
    "byte level, digits from the right": lambda: _byte_level(
        pre_tokenizers.Split(Regex(DIGITS_FROM_THE_RIGHT), "isolated")
    ),
    "byte level, single digits": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "byte level, seven at a time": lambda: _byte_level(pre_tokenizers.FixedLength(7)),
    "byte level, added tokens": lambda: _byte_level(**ADDED),
    "prepend": lambda: _sentencepiece(None, split=False),
    "prepend, added tokens": lambda: _sentencepiece(None, split=False, **ADDED),
    "first": lambda: _sentencepiece("first", split=False),
    "first, split": lambda: _sentencepiece("first", split=True),
    "always": lambda: _sentencepiece("always", split=True),
    "always, added tokens": lambda: _sentencepiece("always", split=False, **ADDED),
    "never": lambda: _sentencepiece("never", split=True),
    "Gemma": _gemma,
    "Unigram": lambda: _unigram(split=True),
    "Unigram, one word": lambda: _unigram(split=False),
    "WordPiece": _word_piece,
    "CLIP": _clip,
}
"""Name → a tokenizer that ends documents with </s>."""
KEEPS = [
    name
    for name in KINDS
    if name.split(",")[0] in ("byte level", "prepend", "first", "always", "never", "Gemma")
    and "added" not in name
]
"""Those that keep a text as it is; spaces beside an added token may belong to it."""


@cache
def tokenizer_json(name: str) -> str:
    text: str = KINDS[name]().to_str()
    return text


@cache
def tokenizer(name: str) -> JsonTokenizer:
    return JsonTokenizer(tokenizer_json(name), end_of_document="</s>", what=name)
