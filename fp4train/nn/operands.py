"""The forms of x and dy that the GEMMs multiply: row-wise, and column-wise, quantised along tokens.

Where wgrad takes the values of the codes that fprop multiplied, the row-wise form serves both: as
codes, whose values backward takes.

Where other ranks hold the rest of the tensor, its amaxes are taken over them: of what is quantised
and, for a spec that requantises, of what is rounded before. Random bits are keyed by the position
in the whole tensor.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fp4train.backends import Prepared
from fp4train.nn.call import LayerCall
from fp4train.nn.layer_shard import LayerShard, RunsQuantizer
from fp4train.nn.ranks import Ranks, amax_over
from fp4train.quantize import (
    Decoded,
    Operand,
    PairQuantizer,
    RandomKey,
    has_tensor_amax,
    measure_amax,
    quantizer,
    requantised,
)
from fp4train.shards import Runs

_OFFSET_SPREAD = 1 << 34
"""Column range for token offsets that are not multiples of 8; no other offset reaches it."""


class Form:
    """One form of x or dy: row-wise, or column-wise (that of the transposed tensor, along tokens).

    Args:
        operand: the operand of a GEMM that the form is.
        codes: prepare codes, to save them or for a backend that multiplies codes; else decoded
            values.
        tiles: prepare block scales of codes in tiles, where a kernel does.
        shard: place of the tensor in the whole layer's; None: it is whole.
        tokens: whether the tensor is this rank's tokens only, of those that the ranks of `shard`
            share.
    """

    __slots__ = (
        "amax_ranks",
        "codes",
        "column",
        "delayed",
        "feature",
        "make",
        "needs_no_position",
        "number",
        "plain",
        "pure",
        "quantizer",
        "rank",
        "rounding_ranks",
        "runs",
        "source",
        "spec",
        "stochastic",
        "tensor",
        "tiles",
    )

    def __init__(
        self,
        operand: Operand,
        codes: bool,
        tiles: bool,
        device: str,
        *,
        shard: LayerShard | None,
        tokens: bool,
    ) -> None:
        spec = operand.spec
        self.tensor = operand.tensor
        self.source = operand.source
        self.spec = spec
        self.codes = codes
        self.tiles = tiles
        self.column = operand.transposed
        self.number = operand.random_operand
        self.stochastic = spec is not None and spec.random
        self.delayed = spec is not None and spec.earlier_amax
        self.pure = not self.stochastic and not self.delayed
        """Whether it is a function of the tensor alone, of its parts on other ranks included."""
        self.feature = self.rank = 0
        self.amax_ranks: tuple[Ranks, ...] = ()
        self.rounding_ranks: tuple[Ranks, ...] = ()
        """Ranks over which the amax is taken of what the spec requantises."""
        self.runs: Runs = ()
        """Runs of the features within the whole layer's, where random bits depend on them and there
        are several.
        """
        if shard is not None:
            if self.stochastic:
                self.runs = shard.runs_of(self.tensor)
            else:
                self.runs = ()
            self.feature = shard.starts(self.tensor)[1]
            if tokens and shard.tensor is not None:
                self.rank = shard.tensor.rank
            else:
                self.rank = 0
            self.amax_ranks, self.rounding_ranks = shard.amax_and_rounding_ranks(
                operand, tokens=tokens
            )
        self.needs_no_position = self.pure and not self.amax_ranks and not self.rounding_ranks
        """Whether it takes neither random bits nor an amax."""
        if spec is not None:
            chosen = quantizer(
                replace(spec, requantises=None) if self.rounding_ranks else spec, device
            )
            self.quantizer = chosen.in_tiles if tiles else chosen
            self.make: Callable[..., Prepared]
            if codes:
                self.make = self.quantizer.codes
            else:
                self.make = self.quantizer.values
            self.plain = replace(spec, requantises=None)
            if self.runs:
                self.make = RunsQuantizer(
                    quantizer(self.plain, device), self.runs, columns=not self.column, codes=codes
                )

    def prepare(self, x_MK: Tensor, call: LayerCall) -> Prepared:
        """This form of x [M, K]."""
        if self.column:
            x_MK = x_MK.T
        if self.spec is None:
            return Decoded(x_MK, None)
        if self.needs_no_position:
            return self.make(x_MK)
        if self.stochastic:
            key = self.key(call, x_MK.shape[1 if self.column else 0])
        else:
            key = None
        if (self.rounding_ranks or self.runs) and self.spec.requantises is not None:
            x_MK = requantised(
                x_MK, self.spec, amax_over(self.rounding_ranks, x_MK.T, self.spec.requantises)
            )
        return self.make(x_MK, key, self.amax(x_MK, call, key))

    def key(self, call: LayerCall, tokens: int) -> RandomKey:
        """Key of the random bits of a tensor of so many tokens, which is rounded stochastically."""
        token = call.position.token + self.rank * tokens
        if not self.column:
            return call.position.key(call.layer_key, self.number, token, self.feature)
        # Tokens are columns, eight neighbours of which share one draw of the generator.
        if token % 8 == 0:
            column = token
        else:
            column = _OFFSET_SPREAD + token * 8
        return call.position.key(call.layer_key, self.number, self.feature, column)

    def amax(self, x: Tensor, call: LayerCall, key: RandomKey | None) -> Tensor | None:
        """The amax if it is not that of x: that of earlier steps, or the maximum over the ranks
        that hold the rest of x.
        """
        if self.delayed and self.spec is not None:
            return call.amax(self.tensor, self.quantizer, x, ranks=self.amax_ranks)[0]
        if not self.amax_ranks or self.spec is None:
            return None
        return amax_over(self.amax_ranks, x, self.spec, key)


class TensorForms:
    """Both forms of x or dy, in one call if the kernels support that.

    Args:
        operands, codes, tiles: one for the row-wise and one for the column-wise form, as for
            `Form`; so the rest.

    Raises:
        ValueError: the column-wise form is values of other codes than the row-wise one.
    """

    __slots__ = (
        "column",
        "delayed",
        "joined",
        "own_amax",
        "pair",
        "pure",
        "requantise",
        "row",
        "values",
        "wants",
    )

    def __init__(
        self,
        operands: tuple[Operand, Operand],
        codes: tuple[bool, bool],
        device: str,
        shard: LayerShard | None = None,
        *,
        tiles: tuple[bool, ...] = (False, False),
        tokens: bool = False,
    ) -> None:
        operands[1].check_values(operands[0])
        self.values = operands[1].values
        """Function that gives what a GEMM multiplies in the place of the column-wise form, of the
        codes of the row-wise one; None: the column-wise form is prepared.
        """
        if self.values is not None:
            codes = (True, True)
        self.row, self.column = row, column = tuple(
            Form(*form, device, shard=shard, tokens=tokens)
            for form in zip(operands, codes, tiles, strict=True)
        )
        self.pure = row.pure and column.pure
        kinds = [(form.source, form.codes, form.tiles, form.amax_ranks) for form in (row, column)]
        self.wants = kinds[:1], kinds
        """Properties on which the row-wise form depends, and on which both do."""
        self.delayed = row.delayed or column.delayed
        self.own_amax = not (self.delayed or row.amax_ranks or column.amax_ranks)
        """Whether the amaxes are those of the tensor itself."""
        if row.amax_ranks == column.amax_ranks and not self.delayed:
            self.joined = row.amax_ranks
        else:
            self.joined = ()
        """The ranks over which the amaxes of both forms are taken, in one all-reduce."""
        self.pair = None
        self.requantise: Callable[..., Prepared] | None = None
        """Quantiser of the values of the row-wise form, where the column-wise form requantises
        these.
        """
        separate = row.rounding_ranks or column.rounding_ranks or row.runs or column.runs
        if row.spec is not None and column.spec is not None and not separate:
            self.pair = PairQuantizer(
                row.quantizer, column.quantizer, row_codes=codes[0], column_codes=codes[1]
            )
            decodes = device == "cpu" and not codes[0] and row.spec.decodes_to_values
            if decodes and column.spec.requantises == row.spec:
                plain = quantizer(column.plain, device)
                self.requantise = plain.codes if codes[1] else plain.values

    def prepare(
        self,
        x_MK: Tensor,
        call: LayerCall,
        row: bool = True,
        column: bool = True,
        *factor_scales: Tensor,
    ) -> tuple[Prepared | None, Prepared | None]:
        """(row-wise form, column-wise form) of x [M, K]; None for what is not asked for. Where the
        row-wise form serves both, it is both: codes [M, K]. factor_scales: see `PairQuantizer`.
        """
        if self.values is not None:
            codes = self.row.prepare(x_MK, call)
            return codes, codes if column else None
        if row and column and self.pair is not None:
            if self.row.stochastic:
                row_key = self.row.key(call, x_MK.shape[0])
            else:
                row_key = None
            if self.column.stochastic:
                column_key = self.column.key(call, x_MK.shape[0])
            else:
                column_key = None
            row_amax = column_amax = newest = None
            if self.row.delayed and self.column.delayed:  # one state has the amax of both
                joins = self.pair.joins
                row_amax, newest = call.amax(
                    self.row.tensor,
                    self.row.quantizer,
                    x_MK,
                    kernel_enters_amax=joins,
                    ranks=self.row.amax_ranks,
                )
                column_amax = row_amax
            elif not self.own_amax:
                row_amax, column_amax = self._amaxes(x_MK, call, row_key, column_key)
            if self.requantise is None:
                if not self.pair.writes_factors:
                    factor_scales = ()
                return self.pair(
                    x_MK, row_key, row_amax, column_key, column_amax, newest, factor_scales
                )
            rounded = self.row.make(x_MK, row_key, row_amax)
            assert isinstance(rounded, Decoded)
            return rounded, self.requantise(rounded.rounded().T, column_key, column_amax)
        row_form = self.row.prepare(x_MK, call) if row else None
        return row_form, self.column.prepare(x_MK, call) if column else None

    def _amaxes(
        self, x_MK: Tensor, call: LayerCall, *keys: RandomKey | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The amaxes of both forms, whose keys are given, if they are not those of x."""
        if not self.joined:
            return self.row.amax(x_MK, call, keys[0]), self.column.amax(x_MK.T, call, keys[1])
        assert self.row.spec is not None and self.column.spec is not None
        row_amax = measure_amax(x_MK, self.row.spec, keys[0])
        alike = has_tensor_amax(self.row.spec) and has_tensor_amax(self.column.spec)
        local_amaxes = (
            row_amax,
            row_amax if alike else measure_amax(x_MK.T, self.column.spec, keys[1]),
        )
        both = torch.cat([amax.reshape(-1) for amax in local_amaxes])
        for ranks in self.joined:
            both = ranks.largest(both)
        row, column = both.tensor_split([local_amaxes[0].numel()])
        return row.view(local_amaxes[0].shape), column.view(local_amaxes[1].shape)
