"""A shuffle that needs no memory and no state: a keyed permutation of 0 … n-1, evaluated at any index.

A balanced Feistel network permutes the even-bit numbers below 4^h, the smallest such range that holds n:

    (l, r) → (r, l xor F(r, key_i)),  i = 0 … 5

and an image that falls outside 0 … n-1 is permuted again until it falls inside ("cycle walking", Black and Rogaway
2002, section 3), which leaves a permutation of 0 … n-1. The range is less than 4 n: fewer than four walks are expected.
Shuffling this way costs nothing at the start of an epoch, whatever its length, and a run that resumes at step s sees
exactly the sequences that it would have seen, from (seed, s) alone.
"""

import numpy as np
import numpy.typing as npt

ROUNDS = 6
MASK64 = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """One 64-bit value from another, well mixed (Steele et al. 2014)."""
    z = (value + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def round_keys(seed: int, epoch: int) -> list[int]:
    """The keys of the Feistel rounds for one epoch."""
    state = splitmix64(splitmix64(seed & MASK64) ^ epoch)
    return [splitmix64(state + i) for i in range(ROUNDS)]


def _mix(half: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    z = half ^ np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def permute(index: npt.NDArray[np.int64], n: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where `index` (any subset of 0 … n-1) goes in the permutation of `epoch`."""
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    keys = round_keys(seed, epoch)
    image = index.astype(np.uint64)
    outside = np.ones(len(image), dtype=bool)
    while outside.any():
        left, right = image[outside] >> shift, image[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        image[outside] = (left << shift) | right
        outside = image >= n
    return image.astype(np.int64)
