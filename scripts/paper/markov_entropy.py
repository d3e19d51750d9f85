"""What a Markov model of DNA reaches on the bases that a run holds out: nats per base, by the order of the model.

    python scripts/paper/markov_entropy.py FASTA [--orders 0 2 5 8 10] [--val 0.05]

The bases are those of `data=dna data.path=FASTA data.val=…` with its other defaults. A model of order k counts in the
training bases which letter follows each k letters, with half a count for each letter that it has not seen there
(Krichevsky and Trofimov 1981), and is applied to each held-out base but the first k of each document. It knows all of
its parameters after one pass, so that what a network must be better than costs no training.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4train.data import Dna

HALF = 0.5


def entropy(train: NDArray[Any], held_out: NDArray[Any], order: int, end: int) -> float:
    """Nats per held-out token of a Markov model.

    Args:
        train, held_out: ids; `end` ends a document, and is neither context nor predicted.
    """
    letters = np.setdiff1d(np.union1d(train, held_out), [end])
    size = len(letters)
    seen: dict[int, float] = dict(zip(*_counts(train, letters, order), strict=True))
    contexts: dict[int, float] = {}
    for code, count in seen.items():
        contexts[code // size] = contexts.get(code // size, 0.0) + count
    codes, counts = _counts(held_out, letters, order)
    likely = [
        (seen.get(code, 0.0) + HALF) / (contexts.get(code // size, 0.0) + size * HALF)
        for code in codes
    ]
    return float(-(np.log(likely) * counts).sum() / np.sum(counts))


def _counts(ids: NDArray[Any], letters: NDArray[Any], order: int) -> tuple[list[int], list[float]]:
    """Each run of `order` + 1 letters as a number, the last letter its last digit, and how often it
    occurs.
    """
    digits = np.searchsorted(letters, ids)
    is_letter = (digits < len(letters)) & (letters[np.minimum(digits, len(letters) - 1)] == ids)
    places = len(ids) - order
    codes = np.zeros(places, dtype=np.int64)
    complete = np.ones(places, dtype=bool)
    for back in range(order + 1):
        codes = codes * len(letters) + digits[back : back + places]
        complete &= is_letter[back : back + places]
    distinct, counts = np.unique(codes[complete], return_counts=True)
    return distinct.tolist(), counts.astype(float).tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("fasta", type=Path)
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 2, 5, 8, 10])
    parser.add_argument("--val", type=float, default=0.05)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        data = Dna(path=str(options.fasta), val=options.val, cache_dir=folder).build(
            Path(folder), 1, 0
        )
        end = 256 if data.tokenizer is None else data.tokenizer.end_of_document
        train = np.array(data.train.ids)
        held_out = np.array(data.val.ids)
    print(f"{len(train):,} training and {len(held_out):,} held-out tokens")
    entropies = {order: entropy(train, held_out, order, end) for order in options.orders}
    for order, value in entropies.items():
        print(f"order {order}: {value:.4f} nats per base")


if __name__ == "__main__":
    main()
