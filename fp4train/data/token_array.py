"""Token ids with what a loss needs to know of each, and the check that a vocabulary has them."""

from dataclasses import dataclass

from fp4train.data.stored import Ids, TokenIds, untyped
from fp4train.data.stream import ENDLESS
from fp4train.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """Neighbouring ids of one source in an array: those at places `first` … `end` - 1.

    Args:
        name: its name among the parts; empty: it is all there is.
        share: sequences of the part in each cycle (`schedule.py`).
        epochs: most times that each sequence is shown; None: any number.
    """

    name: str
    first: int
    end: int
    share: int
    epochs: float | None = None

    def most(self, sequences: int) -> int:
        """The sequences that it gives, of so many different ones."""
        return ENDLESS if self.epochs is None else int(self.epochs * sequences)


@dataclass(frozen=True)
class TokenArray:
    """Token ids, in memory or in files; `name` is what an error calls them.

    `scored` says of each id whether it counts in the loss, not 0 or 0; None: all do. `inner_ends`
    says of each whether it is the id that ends a document and yet ends none, as after a turn of a
    conversation; None: there is no such id. Sequences are taken of each of `parts`; where there are
    none, of the whole array; `stages` say from when on the shares of the parts are others: a step
    (integer) or a share of the run.
    """

    ids: TokenIds
    vocab_size: int
    name: str
    scored: TokenIds | None = None
    inner_ends: TokenIds | None = None
    parts: tuple[TokenPart, ...] = ()
    stages: tuple[tuple[int | float, tuple[int, ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, ids: Ids, what: str) -> None:
        """Refuse ids that the model has no embedding for."""
        if not len(ids):
            return
        low = int(ids.min())
        high = int(ids.max())
        if low < 0 or high >= self.vocab_size:
            if low < 0:
                cure = "No tokenizer writes a negative id: write the file anew without it"
            else:
                cure = "Set data.vocab_size to that of the tokenizer that wrote the tokens"
            if untyped(self.ids):
                cure += ", or set data.dtype to the type they were written in"
            raise DataError(
                f"{what} hold token id {low if low < 0 else high}, but the vocabulary has "
                f"{self.vocab_size} ids (0 … {self.vocab_size - 1}). {cure}."
            )
