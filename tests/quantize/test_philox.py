"""The random bits: Random123's known answers, and the published mapping from element to bits."""

import pytest
import torch

from fp4train.quantize import RandomKey, philox4x32, random_bits

# Random123 1.14, tests/kat_vectors, the lines "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, output: str) -> None:
    tensors = tuple(torch.tensor([word]) for word in words(counter))
    assert [int(word) for word in philox4x32(tensors, tuple(words(key)))] == words(output)


def scalar_bits(key: RandomKey, row: int, col: int) -> int:
    """The bits of one element, in plain Python integers."""
    c = [(col + key.col_offset) // 8, row + key.row_offset, key.step * 8 + key.operand, key.layer]
    k = [key.seed & 0xFFFFFFFF, key.seed >> 32]
    for _ in range(10):
        p0 = c[0] * 0xD2511F53
        p1 = c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    lane = (col + key.col_offset) % 8
    return (c[lane // 2] >> (16 * (lane % 2))) & 0xFFFF


def test_each_element_takes_its_half_word() -> None:
    key = RandomKey(
        seed=0xDEADBEEF12345678,
        step=123456,
        layer=0xFEDCBA98,
        operand=5,
        row_offset=7,
        col_offset=64,
    )
    bits = random_bits(key, 5, 19)
    assert bits.shape == (5, 19)
    assert bits.tolist() == [[scalar_bits(key, row, col) for col in range(19)] for row in range(5)]


def test_a_shard_gets_the_bits_of_its_place_in_the_whole() -> None:
    key = RandomKey(seed=1, step=2, layer=3, operand=4)
    whole = random_bits(key, 32, 64)
    assert torch.equal(
        random_bits(key.replace(row_offset=16, col_offset=24), 16, 40), whole[16:, 24:]
    )


@pytest.mark.parametrize("field", ["seed", "step", "layer", "operand"])
def test_any_other_key_gives_other_bits(field: str) -> None:
    fields = {"seed": 1, "step": 2, "layer": 3, "operand": 4}
    other = fields | {field: fields[field] + 1}
    same = random_bits(RandomKey(**fields), 64, 64) == random_bits(RandomKey(**other), 64, 64)
    assert same.float().mean() < 0.01


def test_bits_are_uniform() -> None:
    bits = random_bits(RandomKey(seed=9, step=0, layer=0, operand=0), 256, 1024)
    counts = torch.bincount((bits >> 8).flatten(), minlength=256).double()
    expected = bits.numel() / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert 170 < chi_squared < 350  # 255 degrees of freedom: mean 255, standard deviation 22.6
    per_bit = torch.stack([(bits >> i) & 1 for i in range(16)]).double().mean(dim=(1, 2))
    assert (per_bit - 0.5).abs().max() < 5 * 0.5 / bits.numel() ** 0.5
