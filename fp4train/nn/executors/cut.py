"""The GEMMs of a layer that tensor parallelism cuts.

Tensor parallelism (arXiv:1909.08053) cuts a layer y = x·wᵀ along its out features ("out") or in
features ("in"):

| cut | x | w | y | what is summed over the ranks |
|---|---|---|---|---|
| out | whole | [N/p, K] | [M, N/p] | dx, after dgrad |
| in | [M, K/p] | [N, K/p] | whole | y, after fprop |

With `sequence` (arXiv:2205.05198) the whole activations, x of "out" and y of "in", are cut along
tokens between layers: they are gathered before a GEMM, and the sum leaves each rank its tokens.
Partial sums are added in float32 and rounded once, as a single rank rounds its product. Where they
are sent in BF16 (`LayerShard.rounds_sums`), each of the terms tᵣ is rounded before, too: a sum is
off by at most 2⁻⁸·Σ|tᵣ|, besides its own rounding.

Tokens are gathered as codes: each rank quantises its tokens of x or dy, and codes and scales are
sent. A row-wise form [M, K] is cut along its rows, a column-wise form [K, M] along its blocked
columns. Both equal the forms of the gathered tensor in every bit if the tokens of a rank are whole
blocks; else the tensor itself is gathered. NVFP4 sends 0.5625 B per element and form instead of 2,
and keeps only a rank's own tokens of q(xᵀ) for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4train.backends import Backend, Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.engine import EAGER, Gradients, PreparedPair, Saved
from fp4train.nn.executors.gemms import Gemms
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.operands import TensorForms
from fp4train.nn.ranks import Ranks, local
from fp4train.quantize import Quantized, QuantSpec, quantizer, why_not_cut
from fp4train.quantize.sharded import divided_tensors, joined


class SummedProduct:
    """A backend's products of which each rank has a term: they are summed in float32, and rounded
    once.

    Args:
        shard: the layer's, with its ranks. With `sequence` each rank takes its tokens of the sum.

    Attributes:
        of_rank: backend that makes the term of this rank.
    """

    def __init__(self, backend: Backend, shard: LayerShard) -> None:
        self.of_rank = backend
        self.both = None
        self._shard = shard
        ranks = shard.tensor
        assert ranks is not None
        self._dtype = torch.float32
        self._sum = ranks.sum_rows if shard.sequence else ranks.sum
        if shard.sequence and shard.rounds_sums:
            self._dtype = torch.bfloat16
            self._sum = ranks.sum_rounded_rows
        self.takes_codes = backend.takes_codes
        self.takes_tiles = backend.takes_tiles

    def product(
        self, a: Prepared, b: Prepared, *, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """a [R, C]·b [S, C]ᵀ + bias [S] → [R, S], over the columns C of all ranks, in
        `out_dtype`.
        """
        total = self._sum(self.of_rank.product(a, b, out_dtype=self._dtype))
        return (total if bias is None else total + bias.to(out_dtype)).to(out_dtype)

    def summing_terms_of(self, backend: Backend) -> SummedProduct:
        """The same sum of terms that another backend makes."""
        return SummedProduct(backend, self._shard)


class GatheredForms(TensorForms):
    """Both forms of all tokens of x, of which each rank has its own.

    Args:
        whole: forms of the gathered tensor.
        sent: forms of this rank's tokens, which are sent as codes; None: the tensor itself is
            gathered.
        device: device type of the codes.
    """

    __slots__ = ("device", "ranks", "sent")

    def __init__(
        self, whole: TensorForms, sent: TensorForms | None, ranks: Ranks, device: str
    ) -> None:
        for name in TensorForms.__slots__:
            setattr(self, name, getattr(whole, name))
        self.sent = sent
        self.ranks = ranks
        self.device = device

    def sends_codes(self, tokens: int) -> bool:
        """Whether so many tokens of a rank are sent as codes: they are whole blocks of both forms,
        and whole groups of rows that share a scale.
        """
        if self.sent is None:
            return False
        if not whole_blocks(self.sent.row.spec, tokens, columns=False):
            return False
        return self.sent.values is not None or whole_blocks(self.sent.column.spec, tokens)

    def prepare(
        self,
        x_MK: Tensor,
        call: LayerCall,
        row: bool = True,
        column: bool = True,
        *others: Tensor,
    ) -> PreparedPair:
        """The forms of all tokens; where codes are sent, the column-wise form of this rank's:
        backward sends it.
        """
        if self.sent is None or not self.sends_codes(len(x_MK)):
            return super().prepare(self.gathered(x_MK, call), call, row, column)
        of_row, of_column = self.sent.prepare(x_MK, call, row, column)
        return self.received(of_row, codes=self.row.codes), of_column

    def gathered(self, x_MK: Tensor, call: LayerCall) -> Tensor:
        """x of all tokens; layers that read the same tensor gather it once."""
        shared = call.shared
        seen = None if shared is None else shared.get("gathered")
        if seen is not None and seen[0] == x_MK._version and seen[1].is_set_to(x_MK):
            all_tokens: Tensor = seen[2]
            return all_tokens
        all_tokens = self.ranks.gather_rows(x_MK)
        if shared is not None and not x_MK.is_inference():
            shared["gathered"] = (x_MK._version, x_MK, all_tokens)
        return all_tokens

    def received(
        self, part: Prepared | None, *, codes: bool, along_tokens: bool = False
    ) -> Prepared | None:
        """A form of all tokens from the codes that each rank made of its own."""
        if part is None:
            return None
        assert isinstance(part, Quantized)
        all_codes = gathered(part, self.ranks, along_tokens=along_tokens)
        if codes:
            return all_codes
        return quantizer(all_codes.spec, self.device).decode(all_codes)


class GatheredGradients(GatheredForms):
    """Both forms of all tokens of dy, which one layer reads."""

    __slots__ = ()

    def prepare(
        self,
        x_MK: Tensor,
        call: LayerCall,
        row: bool = True,
        column: bool = True,
        *others: Tensor,
    ) -> PreparedPair:
        of_row, of_column = super().prepare(x_MK, call, row, column)
        if self.sends_codes(len(x_MK)):
            of_column = self.received(of_column, codes=self.column.codes, along_tokens=True)
        return of_row, of_column

    def gathered(self, x_MK: Tensor, call: LayerCall) -> Tensor:
        return self.ranks.gather_rows(x_MK)


class CutGemms(Gemms):
    """The GEMMs of a layer's shard, and the collectives around them."""

    def build(self) -> None:
        super().build()
        shard = self.shard
        assert shard is not None and shard.tensor is not None
        self.ranks = shard.tensor
        self.cut = shard.cut
        self.sequence = shard.sequence
        self.tokens = shard.tokens
        if self.cut == "out":
            self.dgrad = SummedProduct(self.dgrad, shard)  # type: ignore[assignment]
        else:
            self.fprop = SummedProduct(self.fprop, shard)  # type: ignore[assignment]
        if self.sequence and self.cut == "out":
            self.x = GatheredForms(self.x, self._sent("fprop", "x"), self.ranks, self.device)
        elif self.sequence:
            sent = self._sent("dgrad", "dy")
            if sent is not None and sent.column.spec is None:
                sent = None
            self.dy = GatheredGradients(self.dy, sent, self.ranks, self.device)
        self.counted = self.device != "meta"  # there shapes are enough
        self.route = EAGER  # collectives, and tokens whose number changes

    def _sent(self, gemm: str, tensor: str) -> TensorForms | None:
        """The forms of this rank's tokens as codes; None: the row-wise form has none."""
        row = self.plan.sources[gemm, tensor]
        if row.spec is None:
            return None
        forms = row, self.plan.sources["wgrad", tensor]
        return TensorForms(forms, (True, True), self.device, self.shard, tokens=True)

    def takes_call(self, w: Tensor) -> bool:
        return self.counted

    def __call__(
        self, x_MK: Tensor, w: Tensor, bias: Tensor | None, call: LayerCall | None
    ) -> Tensor:
        w_NK = local(w)
        if call is None:
            return self._shape_of(x_MK, w_NK).to(self.dtype)
        call.parameter = w
        return super().__call__(x_MK, w_NK, None if bias is None else local(bias), call)

    def _shape_of(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """A product on the meta device, without collectives: shapes and gradients only."""
        if self.cut == "out":
            x_MK = x_MK.repeat(self.tokens, 1)
        y_MN = torch.nn.functional.linear(x_MK, w_NK.to(x_MK.dtype))
        if self.cut == "in":
            return y_MN.narrow(0, 0, y_MN.shape[0] // self.tokens)
        return y_MN

    def _gathered_once(self, forms: GatheredForms, x: Any, call: LayerCall, tokens: int) -> Any:
        """What was saved of x, of all tokens: codes, or a tensor. Layers that read one tensor,
        whose backward passes follow each other, gather it once.
        """
        coded = isinstance(x, Quantized)
        if x is None or (coded and not forms.sends_codes(tokens)):
            return x
        part = x.codes if coded else x
        shared = call.shared
        seen = None if shared is None else shared.get("gathered for wgrad")
        if seen is not None and seen[0].is_set_to(part):
            return seen[1]
        gathered_x: Any
        if coded:
            gathered_x = gathered(x, self.ranks, along_tokens=self.x.values is None)
        else:
            gathered_x = self.ranks.gather_rows(x)
        if shared is not None:
            shared["gathered for wgrad"] = (part, gathered_x)
        return gathered_x

    def backward(
        self,
        dy_MN: Tensor,
        saved: Saved,
        call: LayerCall,
        total: Tensor | None = None,
    ) -> Gradients:
        w_NK, x = saved
        if isinstance(self.x, GatheredForms):
            x = self._gathered_once(self.x, x, call, len(dy_MN) // self.tokens)
        dx_MK, dw_NK, dbias_N = super().backward(dy_MN, (w_NK, x), call, total)
        # of this rank's tokens; added in float32 and rounded once
        if dbias_N is not None and isinstance(self.dy, GatheredForms):
            total_N = dy_MN.to(self.dtype).sum(0, dtype=torch.float32)
            dbias_N = self.ranks.sum(total_N).to(dbias_N.dtype)
        return dx_MK, dw_NK, dbias_N


def whole_blocks(spec: QuantSpec | None, tokens: int, *, columns: bool = True) -> bool:
    """Whether a rank's tokens, columns or rows of a form, are whole blocks of it; True if it is in
    high precision.
    """
    return spec is None or why_not_cut(spec, tokens, columns=columns) is None


def gathered(part: Quantized, ranks: Ranks, *, along_tokens: bool) -> Quantized:
    """The form of all tokens, in one collective.

    Args:
        part: the form of this rank's tokens.
        along_tokens: whether tokens are columns.
    """
    tensors = divided_tensors(part, columns=along_tokens)
    sent = [tensor.view(torch.uint8) for tensor in tensors]
    received = ranks.gather_rows(torch.cat([tensor.reshape(1, -1) for tensor in sent], dim=1))
    pieces = torch.split(received, [tensor.numel() for tensor in sent], dim=1)
    gathered_tensors = [
        piece.reshape(-1, bytes_.shape[1]).contiguous().view(tensor.dtype)
        for piece, bytes_, tensor in zip(pieces, sent, tensors, strict=True)
    ]
    extent = ranks.size * part.shape[int(along_tokens)]
    return joined(part, gathered_tensors, extent, columns=along_tokens).contiguous()
