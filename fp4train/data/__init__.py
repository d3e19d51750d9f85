"""Text or token files → packed token ids → batches. One file per source; `loader.py` serves all of them."""

from fp4train.data.huggingface import HuggingFace
from fp4train.data.loader import Loader
from fp4train.data.source import Source
from fp4train.data.stdlib import Stdlib
from fp4train.data.text import Text
from fp4train.data.token_file import Tokens
from fp4train.data.tokens import TokenArray, TokenData
from fp4train.errors import DataError

__all__ = ["DataError", "HuggingFace", "Loader", "Source", "Stdlib", "Text", "TokenArray", "TokenData", "Tokens"]
