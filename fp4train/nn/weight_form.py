"""The form of a weight that one GEMM needs: by which spec, for which backend, row-wise or
column-wise.

For square blocks the column-wise form is the transpose of the row-wise form, a view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch

from fp4train.backends import Backend, Prepared
from fp4train.nn.engine import fuses
from fp4train.nn.layer_shard import WHOLE, LayerShard, RunsQuantizer
from fp4train.quantize import (
    Decoded,
    Operand,
    PairQuantizer,
    Quantized,
    has_tensor_amax,
    quantizer,
)
from fp4train.quantize.source import AnySource

FormKey: TypeAlias = tuple[AnySource, str, torch.dtype, tuple[str, ...]]
"""The key of a prepared form: the source of the operand, the name of the backend, the dtype in high
precision, and the layers whose weights share its global scale.
"""


class PairedForm(NamedTuple):
    """A form that one kernel makes together with the transposed one, whose key is `key`."""

    quantizer: PairQuantizer
    key: FormKey


class WeightForm:
    """The form of the weight [N, K] that one GEMM needs: its operand, for a backend.

    Args:
        operand: the operand; that of dgrad is the form of wᵀ, blocked along out features. A
            `transposed` form has the operand of the form of which it is a view.
        device: device type of the weight.
        shard: place of the weight in the whole layer's; None: it is whole.
        fused: names of the layers whose weights share a global scale with this one, itself
            included; none: it has its own.
        strided: whether gathered codes may be views of what came, in whatever order of memory.

    Attributes:
        amax_ranks, rounding_ranks: ranks over which the amax is taken, and that of what the spec
            requantises.
        of_transpose: whether wᵀ is prepared.
        number: that by which a random key knows the operand.
        pair: the kernel that makes it together with the form of wᵀ, which is `turned_from` it.
        turned_from: key of the form of w whose codes are transposed for this one; None: it is made
            of the weight.
        rounded_from: key of the form of w whose values it requantises; None: the weight is rounded
            first.
        rounds_first: whether it requantises what is rounded by an amax of several ranks, or by runs.
        earlier_amax: whether its amax is that of earlier steps.
        fused: weights whose amaxes count: of the weight, or of what the spec requantises.
        measured: whether its amax is that of the weight, which may be measured with others.
        writes_factors: whether the kernel that makes it writes the factor of a product, too.
    """

    def __init__(
        self,
        operand: Operand,
        backend: Backend,
        dtype: torch.dtype,
        device: str,
        *,
        shard: LayerShard | None = None,
        fused: tuple[str, ...] = (),
        strided: bool = False,
    ) -> None:
        self.spec = spec = operand.spec
        self.dtype = dtype
        self.strided = strided
        # For square blocks and for high precision one set of values serves both forms: one is a
        # view of the other.
        square = spec is None or (spec.transposable and not backend.takes_codes)
        self.transposed = operand.transposed and square
        self.operand = operand.row_wise if self.transposed else operand
        shares_scale = spec is not None and has_tensor_amax(spec.requantises or spec)
        self.fused = fused if shares_scale else ()
        self.key: FormKey = (self.operand.source, backend.name, dtype, self.fused)
        self.of_transpose = self.operand.transposed
        self.number = self.operand.random_operand
        self.pair: PairedForm | None = None
        self.turned_from: FormKey | None = None
        self.rounded_from: FormKey | None = None
        place = shard or WHOLE
        self.start = place.starts("w")[:: -1 if self.of_transpose else 1]
        self.amax_ranks, self.rounding_ranks = place.amax_and_rounding_ranks(self.operand)
        self.earlier_amax = spec is not None and spec.earlier_amax
        self.measured = self.writes_factors = False
        if spec is None:
            return
        self.plain = replace(spec, requantises=None)
        plain = quantizer(self.plain, device)
        self.quantizer = plain if self.rounding_ranks else quantizer(spec, device)
        self.decode = None if backend.takes_codes else self.quantizer.decode
        self.tiles = backend.takes_tiles and spec.scale_format.is_byte
        self.make: Callable[..., Prepared] = self.quantizer.values
        self.make_of_rounded: Callable[..., Prepared] = plain.values
        runs = place.runs_of("w") if spec.random else ()
        if runs:
            self.make = self.make_of_rounded = RunsQuantizer(
                plain, runs, columns=self.of_transpose, codes=backend.takes_codes
            )
        elif backend.takes_codes:
            self.make = self.quantizer.codes
            self.make_of_rounded = plain.codes
        if spec.requantises is None and not runs:
            self.writes_factors = self.quantizer.writes_factors and not backend.takes_codes
            self.measured = (
                fuses(device)
                and has_tensor_amax(spec)
                and self.quantizer.kernel == "triton"
                and (spec.block[1] is not None or spec.format.has_nan)
                and not (self.amax_ranks or self.earlier_amax)
            )
        alone = device == "cpu" and not self.amax_ranks
        decodes = spec.requantises is not None and spec.requantises.decodes_to_values
        if self.of_transpose and self.operand.of is not None and alone and decodes:
            self.rounded_from = (self.operand.of, *self.key[1:])
        self.rounds_first = spec.requantises is not None and bool(runs or self.rounding_ranks)

    def pair_with(self, column: WeightForm) -> None:
        """Make `column` together with this row-wise form, if one kernel makes a tensor's codes and
        their transpose.
        """
        alike = column.spec == self.spec and column.key[1:] == self.key[1:] and column.of_transpose
        if self.spec is None or self.spec.block != (None, None) or not alike:
            return
        both = PairQuantizer(self.quantizer, column.quantizer, row_codes=True, column_codes=True)
        if self.decode is None and both.one_kernel:
            self.pair = PairedForm(both, column.key)
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
