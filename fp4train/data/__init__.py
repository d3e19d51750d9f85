"""Text or token files → packed token ids → batches. One file per source; `loader.py` serves all of
them.
"""

from fp4train.data.answers import AnswerFinder as AnswerFinder, Conversation as Conversation
from fp4train.data.chat import Chat as Chat
from fp4train.data.dna import Dna as Dna
from fp4train.data.encoding import (
    Encoded as Encoded,
    Windows as Windows,
    encode_document as encode_document,
    encode_documents as encode_documents,
    encoding_key as encoding_key,
)
from fp4train.data.files import (
    PIECE_CHARACTERS as PIECE_CHARACTERS,
    files_of as files_of,
    input_files as input_files,
    read_pieces as read_pieces,
)
from fp4train.data.huggingface import (
    HuggingFace as HuggingFace,
    local_files as local_files,
    read_rows as read_rows,
)
from fp4train.data.in_order import InOrder as InOrder, Streamed as Streamed
from fp4train.data.loader import (
    Feed as Feed,
    Loader as Loader,
    permute as permute,
)
from fp4train.data.mixture import (
    Mixture as Mixture,
    MixtureStage as MixtureStage,
    Weighted as Weighted,
)
from fp4train.data.source import (
    RunData as RunData,
    Source as Source,
    Texts as Texts,
    planned_vocab_size as planned_vocab_size,
    token_chunks as token_chunks,
)
from fp4train.data.stdlib import Stdlib as Stdlib
from fp4train.data.stored import StoredIds as StoredIds
from fp4train.data.stream import IGNORED as IGNORED, Stream as Stream
from fp4train.data.template import (
    CHATML as CHATML,
    ChatTemplate as ChatTemplate,
    find_template as find_template,
    keep_template as keep_template,
    kept_template as kept_template,
)
from fp4train.data.text import Text as Text
from fp4train.data.token_array import TokenArray as TokenArray, TokenPart as TokenPart
from fp4train.data.token_file import Tokens as Tokens
from fp4train.data.tokens import (
    Ids as Ids,
    Piece as Piece,
    TokenData as TokenData,
    Tokenizer as Tokenizer,
    begin_of_document as begin_of_document,
    token_bytes as token_bytes,
)
from fp4train.errors import DataError as DataError
