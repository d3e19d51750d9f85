"""Text or token files → packed token ids → batches. One file per source; `loader.py` serves all of
them.
"""

from fp4train.data.chat import Chat as Chat
from fp4train.data.dna import Dna as Dna
from fp4train.data.encoding import encoding_key as encoding_key
from fp4train.data.files import PIECE_CHARACTERS as PIECE_CHARACTERS
from fp4train.data.huggingface import HuggingFace as HuggingFace
from fp4train.data.loader import Loader as Loader
from fp4train.data.mixture import Mixture as Mixture
from fp4train.data.source import (
    Source as Source,
    planned_vocab_size as planned_vocab_size,
    token_chunks as token_chunks,
)
from fp4train.data.stdlib import Stdlib as Stdlib
from fp4train.data.template import ChatTemplate as ChatTemplate, kept_template as kept_template
from fp4train.data.text import Text as Text
from fp4train.data.token_array import TokenArray as TokenArray
from fp4train.data.token_file import Tokens as Tokens
from fp4train.data.tokens import (
    Piece as Piece,
    TokenData as TokenData,
    begin_of_document as begin_of_document,
    token_bytes as token_bytes,
)
from fp4train.errors import DataError as DataError
