"""Conversations in sequences of equal length."""

import numpy as np

from fp4train.data.packing import Learned, pack


def test_a_conversation_goes_into_the_fullest_sequence_that_has_room() -> None:
    conversations = [
        Learned(np.full(length, number), np.ones(length, bool))
        for number, length in enumerate((5, 7, 1), start=1)
    ]
    packed, answers, inner_ends = pack(conversations, end=0, seq_len=10, dtype=np.dtype(np.uint8))
    assert packed.tolist() == [1] * 5 + [0] * 5 + [2] * 7 + [0, 3, 0] + [0]
    assert answers.tolist() == [1] * 6 + [0] * 4 + [1] * 10 + [0]
    assert not inner_ends.any()
