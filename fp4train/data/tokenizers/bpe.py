"""A byte-level BPE trained on the run's own data (GPT-2's pre-tokenizer; Radford et al. 2019,
section 2.2).

Every byte is a token, so any text can be encoded; merges are learned from the first `sample`
characters of the data. Training is deterministic, and the result is kept in the run directory,
where a resumed run finds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp4train.data.tokenizers.json_file import JsonTokenizer, run_tokenizer
from fp4train.data.tokens import Documents
from fp4train.errors import DataError

END = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class BytePairs:
    """`data/tokenizer=bpe data.tokenizer.vocab_size=4096`: at most so many ids, bytes and document
    end included.
    """

    vocab_size: int = 4096
    sample: int = 20_000_000

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise ValueError(
                f"data.tokenizer.vocab_size={self.vocab_size}: at least 257 (256 bytes and a "
                "document end)"
            )
        if self.sample < 1:
            raise ValueError(
                f"data.tokenizer.sample={self.sample}: allowed are whole numbers of "
                "characters from 1"
            )

    def build(self, documents: Documents, run_dir: Path) -> JsonTokenizer:
        origin = f"bpe of {self.vocab_size} ids from {self.sample} characters"
        what = str(run_dir / "tokenizer.json")
        return run_tokenizer(run_dir, origin, lambda: (self._train(documents), what), END)

    def _train(self, documents: Documents) -> str:
        import sys

        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=sys.stderr.isatty(),
        )
        tokenizer.train_from_iterator(self._sampled(documents), trainer)
        text: str = tokenizer.to_str()
        return text

    def _sampled(self, documents: Documents) -> Iterator[str]:
        left = self.sample
        for piece in documents():
            yield piece.text[:left]
            left -= len(piece.text)
            if left <= 0:
                return
        if left == self.sample:
            raise DataError("there is no text to train data/tokenizer=bpe on")
