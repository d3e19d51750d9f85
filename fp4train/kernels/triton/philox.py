"""Philox4x32-10 (Salmon et al., SC 2011) with fp4train's counters: (column // 8, row, step*8 + operand, layer), key
= the run's seed.

One call serves eight neighbours of a row: element j takes half j % 2 (0 = low) of word j // 2. `tl.rand` lays its
counter out otherwise.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds. uint32 tensors of one shape (c2, c3 and the key may be scalars) -> four of them."""
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def random_words(group, row, anchor, key0, key1, counter2, counter3, col_group, row_offset):
    """The four words of each group of eight columns. group, row: integer tensors that broadcast; the rest int32
    scalars (bit patterns). counter2 may be a pointer to one: the step's, in a CUDA graph.

    anchor: zeros of that shape in the layout in which the words are needed, in disguise (a sign bit known to us, not
    to Triton): it keeps Triton from drawing them in another layout and sending each through shared memory. 0 where
    there is no such danger.
    """
    if counter2.dtype.is_ptr():
        counter2 = tl.load(counter2)
    zero = (group * 0 + row * 0).to(tl.uint32) + anchor
    c0 = group.to(tl.uint32) + col_group.to(tl.uint32) + zero
    c1 = row.to(tl.uint32) + row_offset.to(tl.uint32) + zero
    return philox4x32(
        c0, c1, counter2.to(tl.uint32) + zero, counter3.to(tl.uint32) + zero, key0.to(tl.uint32), key1.to(tl.uint32)
    )


@triton.jit
def fraction(half):
    """(bits + 1/2) / 2^16 of 16 bits held in a uint32: as the mantissa of a number in [1, 2), so without an
    int-to-float cast."""
    return ((half << 7) | 0x3F800040).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def eight_fractions(w0, w1, w2, w3):
    """Words [A, G] -> thresholds [A, G, 8] in (0, 1)."""
    j = tl.arange(0, 8)[None, None, :]
    low = tl.where(j < 2, w0[:, :, None], w1[:, :, None])
    high = tl.where(j < 6, w2[:, :, None], w3[:, :, None])
    word = tl.where(j < 4, low, high)
    return fraction((word >> (16 * (j & 1)).to(tl.uint32)) & 0xFFFF)
