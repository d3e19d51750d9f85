"""Text or token files → packed token ids → batches. One file per source; `loader.py` serves all of
them.
"""

from fp4train.data.chat import Chat as Chat
from fp4train.data.dna import Dna as Dna
from fp4train.data.huggingface import HuggingFace as HuggingFace
from fp4train.data.loader import Loader as Loader
from fp4train.data.mixture import Mixture as Mixture
from fp4train.data.source import Source as Source
from fp4train.data.stdlib import Stdlib as Stdlib
from fp4train.data.text import Text as Text
from fp4train.data.token_array import TokenArray as TokenArray
from fp4train.data.token_file import Tokens as Tokens
from fp4train.data.tokens import TokenData as TokenData
from fp4train.errors import DataError as DataError
