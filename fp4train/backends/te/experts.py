"""The GEMMs of a layer of experts on TE's kernels: one `te.pytorch.GroupedLinear` for each table.

    y [M, N]: rows of expert e are x_e [m_e, K] · w_eᵀ + b_e

TE splits the rows by `m_splits`, quantises each part by itself (amaxes, blocks) and multiplies all
parts in one call (module/grouped_linear.py, module/_split_quantization.py). It takes parts of whole
tiles: of 128 rows for NVFP4, 32 for MXFP8, else 16 (quantization.py
get_align_size_for_quantization); ours are padded with rows of zeros, which change neither amax nor
product. An expert without tokens has no rows.

The parameters come with each call, one per expert; the module holds quantisers. Weights are
quantised in each call. Its random bits are TE's, not keyed by the expert's name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4train.backends.protocol import LayerState
from fp4train.backends.table import Table
from fp4train.backends.te.availability import pytorch_module
from fp4train.backends.te.executor import summed, te_autocast
from fp4train.backends.te.translate import to_te


class TEExperts(LayerState):
    """Runs the GEMMs of one layer of experts through TE.

    Args:
        name: the layer's name, for TE's messages.
    """

    kind = "te"

    def __init__(self, *, name: str) -> None:
        self.name = name
        self._built: dict[Table, tuple[Any, Any, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave TE's modules behind; they are rebuilt when needed."""
        return {**self.__dict__, "_built": {}}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        table: Table,
        counts: Sequence[int],
        *,
        into: Callable[[Any], Tensor] | None = None,
    ) -> Tensor:
        """y [M, N] in the recipe's dtype; rows after the sum of `counts` are zero.

        Args:
            x: [M, K] on a CUDA device, sorted by expert.
            weight: [E, N, K]; bias: [E, N] or None.
            table: any that `why_not` has nothing against in a layer of experts.
            counts: rows of each expert.
            into: see `ExpertKernels`; None: dw is returned, in the recipe's dtype.
        """
        te = pytorch_module()
        dtype = table.torch_dtype
        experts, n, k = weight.shape
        if table not in self._built:
            # On the meta device, because the parameters are the caller's.
            options = {
                "bias": bias is not None,
                "params_dtype": weight.dtype,
                "device": "meta",
                "name": self.name,
            }
            te_recipe = to_te(table)
            multiple = te.quantization.get_align_size_for_quantization(te_recipe)
            self._built[table] = te.GroupedLinear(experts, k, n, **options), te_recipe, multiple
        module, te_recipe, multiple = self._built[table]
        splits = [count + -count % multiple for count in counts]
        parts = torch.split(x[: sum(counts)].to(dtype), list(counts))
        rows = torch.cat(
            [F.pad(part, (0, 0, 0, to - len(part))) for part, to in zip(parts, splits, strict=True)]
        )
        sums = _Sums(into)
        for number, expert_weight in enumerate(weight.unbind(0)):
            module._parameters[f"weight{number}"] = (
                expert_weight if into is None else summed(expert_weight, sums.of(number))
            )
            if bias is not None:
                module._parameters[f"bias{number}"] = bias[number]
        module.fuse_wgrad_accumulation = into is not None
        # TE wants torch's autocast where parameters and activations differ (float32 weights, BF16
        # activations).
        cast = torch.autocast(x.device.type, dtype=dtype, enabled=weight.dtype != dtype)
        with cast, te_autocast(te, te_recipe):
            y: Tensor = module(rows, splits) if len(rows) else F.linear(rows, weight[0].to(dtype))
        taken = [part[:count] for part, count in zip(torch.split(y, splits), counts, strict=True)]
        return F.pad(torch.cat(taken), (0, 0, 0, len(x) - sum(counts)))

    def state(self) -> dict[str, Tensor]:
        """Nothing: delayed scaling is refused."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing is restored."""


class _Sums:
    """The gradients that `into` gives, asked for once, by expert."""

    def __init__(self, into: Callable[[Any], Tensor] | None) -> None:
        self.into = into
        self.whole: Tensor | None = None

    def of(self, number: int) -> Callable[[Any], Tensor]:
        def get(node: Any) -> Tensor:
            if self.whole is None:
                assert self.into is not None
                self.whole = self.into(node)
            return self.whole[number]

        return get
