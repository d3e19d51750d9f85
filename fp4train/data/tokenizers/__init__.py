"""Text to token ids and back: bytes, a ready-made tokenizer, or one trained on the run's own data.
One kind a file.
"""

from fp4train.data.tokenizers.bpe import BytePairs
from fp4train.data.tokenizers.bytes import Bytes
from fp4train.data.tokenizers.json_file import JsonTokenizer
from fp4train.data.tokenizers.pretrained import Pretrained
