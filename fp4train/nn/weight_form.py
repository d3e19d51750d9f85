"""The form of a weight that one GEMM needs: by which spec, for which backend, row-wise or
column-wise.

For square blocks the column-wise form is the transpose of the row-wise form, a view.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch

from fp4train.backends import Backend, Prepared
from fp4train.nn.layer_shard import LayerShard
from fp4train.nn.ranks import Ranks
from fp4train.quantize import (
    Decoded,
    Operand,
    PairQuantizer,
    Quantized,
    Requantised,
    has_tensor_amax,
    quantizer,
)
from fp4train.quantize.source import Source
from fp4train.shards import Runs

FormKey: TypeAlias = tuple[Source, str, torch.dtype]
"""The key of a prepared form: the source of the operand, the name of the backend, and the dtype in
high precision.
"""


class WeightForm:
    """The form of the weight [N, K] that one GEMM needs: its operand, for a backend.

    Args:
        operand: the operand; that of dgrad is the form of wᵀ, blocked along out features.
        device: device type of the weight.
        shard: place of the weight in the whole layer's; None: it is whole.
        fused: names of the layers whose weights share a global scale with this one, itself
            included; none: it has its own.
    """

    __slots__ = (
        "amax_ranks",
        "both",
        "both_key",
        "decode",
        "dtype",
        "fused",
        "key",
        "make",
        "number",
        "of_transpose",
        "operand",
        "quantizer",
        "requantise",
        "rounded_from",
        "rounding_ranks",
        "runs",
        "source",
        "spec",
        "start",
        "strided",
        "tiles",
        "transposed",
        "turned_from",
    )

    def __init__(
        self,
        operand: Operand,
        backend: Backend,
        dtype: torch.dtype,
        device: str,
        *,
        shard: LayerShard | None = None,
        fused: tuple[str, ...] = (),
    ) -> None:
        spec = operand.spec
        self.spec = spec
        self.dtype = dtype
        # For square blocks and for high precision one set of values serves both forms: one is a
        # view of the other.
        square = spec is None or (spec.transposable and not backend.takes_codes)
        self.transposed = operand.transposed and square
        self.operand = operand.row_wise if self.transposed else operand
        """The operand that is prepared: of `transposed` forms that of which this one is a view."""
        self.source = self.operand.source
        self.of_transpose = self.operand.transposed
        """Whether wᵀ is prepared."""
        self.number = self.operand.random_operand
        self.amax_ranks: tuple[Ranks, ...] = ()
        self.rounding_ranks: tuple[Ranks, ...] = ()
        """Ranks over which the amax is taken of what the spec requantises."""
        if spec is not None and has_tensor_amax(spec.requantises or spec):
            self.fused = fused
        else:
            self.fused = ()
        """Weights whose amaxes count: of the weight, or of what the spec requantises."""
        self.start = (0, 0)
        self.runs: Runs = ()
        """Runs of the out features within the whole layer's, where random bits depend on them and
        there are several.
        """
        if shard is not None:
            if spec is not None and spec.random:
                self.runs = shard.runs_of("w")
            else:
                self.runs = ()
            self.amax_ranks, self.rounding_ranks = shard.amax_and_rounding_ranks(self.operand)
            row, column = shard.starts("w")
            if self.of_transpose:
                self.start = (column, row)
            else:
                self.start = (row, column)
        if spec is not None:
            plain = quantizer(replace(spec, requantises=None), device)
            if self.rounding_ranks:
                chosen = plain
            else:
                chosen = quantizer(spec, device)
            self.make, self.requantise = (
                form_quantizer.codes if backend.takes_codes else form_quantizer.values
                for form_quantizer in (chosen, plain)
            )
            self.decode = None if backend.takes_codes else chosen.decode
            self.quantizer = chosen
        self.both: PairQuantizer | None = None
        """The quantizer that makes this form and the transposed one at once, whose key is
        `both_key`.
        """
        self.both_key: FormKey | None = None
        self.turned_from: FormKey | None = None
        """The key of the row-wise form whose transposed codes are this form's; None: it is made
        from the weight.
        """
        self.rounded_from: FormKey | None = None
        """The key of the row-wise form whose values this form requantises; None: the weight is
        rounded first.
        """
        if (
            self.of_transpose
            and isinstance(self.source, Requantised)
            and device == "cpu"
            and not self.amax_ranks
        ):
            self.rounded_from = (self.source.of, backend.name, dtype)
        self.strided = False
        """Whether gathered codes may be views of what came, in whatever order of memory."""
        self.tiles = backend.takes_tiles and spec is not None and spec.scale_format.is_byte
        self.key: FormKey = (self.source, backend.name, dtype)

    def pair_with(self, column: WeightForm) -> None:
        """Make `column` together with this row-wise form, if one kernel makes a tensor's codes and
        their transpose.
        """
        alike = column.spec == self.spec and column.key[1:] == self.key[1:] and column.of_transpose
        if self.spec is None or self.spec.block != (None, None) or not alike:
            return
        both = PairQuantizer(self.quantizer, column.quantizer, row_codes=True, column_codes=True)
        if self.decode is None and both.one_kernel:
            self.both = both
            self.both_key = column.key
            column.turned_from = self.key

    def view_for_gemm(self, prepared: Prepared) -> Prepared:
        """This form from codes that were gathered, or from the values that serve both forms."""
        if isinstance(prepared, Quantized):
            prepared = prepared if self.strided else prepared.contiguous()
            if self.decode is not None:
                prepared = self.decode(prepared)
        if self.transposed:
            assert isinstance(prepared, Decoded)
            return Decoded(prepared.values.T, prepared.scale)
        return prepared
