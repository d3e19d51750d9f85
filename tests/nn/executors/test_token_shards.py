"""Tokens gathered as codes: equal to the codes of the gathered tokens, in fewer bytes."""

import pytest
import torch
from torch import Tensor

from fp4train.nn import Ranks
from fp4train.nn.executors import gathered, whole_blocks
from fp4train.precision import MXFP8, NVFP4, FP8Block, FP8Current, FP8Row, Recipe
from fp4train.precision.recipes import TetraJetV2
from fp4train.quantize import Quantized, QuantSpec, RandomKey, amax_extent, measure_amax, quantize

KEY = RandomKey(seed=1, step=2, layer=3, operand=4)
RECIPES: list[Recipe] = [
    NVFP4(),
    MXFP8(),
    FP8Current(),
    FP8Row(),
    FP8Block(),
    TetraJetV2(aligned=False),
]
SPECS = list(
    dict.fromkeys(
        spec for recipe in RECIPES for spec in recipe.table().specs() if spec.block[0] in (1, None)
    )
)


class Wire(Ranks):
    """Ranks that send one after the other: the last one receives what all have sent."""

    def __init__(self, size: int) -> None:
        super().__init__(group=None, rank=0, size=size)
        object.__setattr__(self, "sent", [])

    def gather_rows(self, x_MD: Tensor) -> Tensor:
        self.sent.append(x_MD)  # type: ignore[attr-defined]
        sent: list[Tensor] = self.sent  # type: ignore[attr-defined]
        return torch.cat(sent if len(sent) == self.size else [x_MD] * self.size)


def sent(
    x_MK: Tensor, spec: QuantSpec, ranks: int, *, along_tokens: bool
) -> tuple[Quantized, Quantized, Tensor]:
    """(form of all tokens as received, as quantised at once, what one rank sends)."""
    x = x_MK.T if along_tokens else x_MK
    amax = None if amax_extent(spec) is None else measure_amax(x, spec)
    wire = Wire(ranks)
    extent = x_MK.shape[0] // ranks
    for rank, tokens in enumerate(x_MK.split(extent)):
        at = {"col_offset" if along_tokens else "row_offset": rank * extent}
        own = (
            amax
            if amax is None or amax.numel() == 1 or along_tokens
            else amax[rank * extent :][:extent]
        )
        part = quantize(tokens.T if along_tokens else tokens, spec, key=KEY.replace(**at), amax=own)
        received = gathered(part, wire, along_tokens=along_tokens)
    return received, quantize(x, spec, key=KEY, amax=amax), wire.sent[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("along_tokens", [False, True])
@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.element}-{s.block}-{s.rounding[:4]}-{bool(s.hadamard)}"
)
def test_the_received_form_is_that_of_all_tokens(spec: QuantSpec, along_tokens: bool) -> None:
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    received, whole, _ = sent(x, spec, 4, along_tokens=along_tokens)
    assert received.shape == whole.shape
    assert torch.equal(received.codes, whole.codes) and torch.equal(received.scales, whole.scales)
    assert (received.amax is None) == (whole.amax is None)
    assert whole.amax is None or torch.equal(received.amax, whole.amax)  # type: ignore[arg-type]
    assert torch.equal(received.decoded().values, whole.decoded().values)


@pytest.mark.parametrize("along_tokens", [False, True])
def test_nvfp4_sends_nine_sixteenths_of_a_byte_per_element(along_tokens: bool) -> None:
    spec = NVFP4().table().fprop.first
    assert spec is not None
    buffer = sent(torch.randn(512, 128).bfloat16(), spec, 4, along_tokens=along_tokens)[2]
    assert buffer.numel() * buffer.element_size() == 512 // 4 * 128 * 9 // 16


def test_tokens_that_are_not_whole_blocks_are_not_sent_as_codes() -> None:
    spec = NVFP4().table().wgrad.first
    assert whole_blocks(spec, 48) and not whole_blocks(spec, 40) and whole_blocks(None, 40)
