"""Text or token files → packed token ids → batches. One file per source; `loader.py` serves all of
them.
"""

from fp4train.data.answers import AnswerFinder, Conversation
from fp4train.data.chat import Chat
from fp4train.data.dna import Dna
from fp4train.data.encoding import (
    Encoded,
    Windows,
    encode_document,
    encode_documents,
    encoding_key,
)
from fp4train.data.files import (
    PIECE_CHARACTERS,
    files_of,
    input_files,
    read_pieces,
)
from fp4train.data.huggingface import (
    HuggingFace,
    local_files,
    read_rows,
)
from fp4train.data.in_order import InOrder, Streamed
from fp4train.data.loader import (
    Feed,
    Loader,
    permute,
)
from fp4train.data.mixture import (
    Mixture,
    MixtureStage,
    Weighted,
)
from fp4train.data.source import (
    RunData,
    Source,
    Texts,
    planned_vocab_size,
    token_chunks,
)
from fp4train.data.stdlib import Stdlib
from fp4train.data.stored import StoredIds
from fp4train.data.stream import IGNORED, Stream
from fp4train.data.template import (
    CHATML,
    ChatTemplate,
    find_template,
    keep_template,
    kept_template,
)
from fp4train.data.text import Text
from fp4train.data.token_array import TokenArray, TokenPart
from fp4train.data.token_file import Tokens
from fp4train.data.tokens import (
    Ids,
    Piece,
    TokenData,
    Tokenizer,
    begin_of_document,
    token_bytes,
)
from fp4train.errors import DataError
