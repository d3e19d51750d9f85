"""Backends execute the GEMMs: one per file, and the choice among them.

te               Transformer Engine's kernels, for a layer's three GEMMs together; only this folder uses TE
native           torch's scaled_mm on the codes
grouped          its scaled_grouped_mm, for several experts at once
emulate          decoded operands in BF16, exact products; runs everywhere. Also torch's GEMM, of high precision
reference        the same products, accumulated block by block as in TE's reference; slow
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp4train.backends import grouped
from fp4train.backends.emulate import (
    EMULATE,
    TORCH,
    add_product,
    matmul,
    widened,
    widens,
)
from fp4train.backends.native import (
    NATIVE,
    Native,
    cpu_multiplies_rows,
)
from fp4train.backends.protocol import (
    Backend,
    DataRanks,
    ExpertKernels,
    KernelCall,
    LayerBackend,
    LayerKernels,
    LayerState,
    Multiplied,
    NotShownError,
    Prepared,
    Readers,
    SavedTensor,
)
from fp4train.backends.reference import REFERENCE
from fp4train.backends.table import (
    GEMMS,
    HIGH_PRECISION,
    OPERANDS,
    Operands,
    Shape,
    Table,
    describe,
    named,
    sourced,
)
from fp4train.backends.te import TRANSFORMER_ENGINE
from fp4train.backends.tensor_cores import (
    ADA_FP8,
    BLACKWELL_FP4,
    BLACKWELL_FP8,
    HOPPER_FP8,
    TensorCore,
)
from fp4train.hardware import Device
from fp4train.text import check_choice

LAYER_BACKENDS: Mapping[str, LayerBackend] = {"te": TRANSFORMER_ENGINE}
BACKENDS: Mapping[str, Backend] = {
    "torch": TORCH,
    "native": NATIVE,
    "emulate": EMULATE,
    "reference": REFERENCE,
}
CHOICES = ("auto", *LAYER_BACKENDS, *(name for name in BACKENDS if name != TORCH.name))
"""Allowed values of `backend=`: torch's GEMM takes no quantised operands."""


class Choice(NamedTuple):
    """The backend of one GEMM, and the reason for it."""

    backend: str
    why: str
    grouped: bool = False
    """Whether it multiplies all experts in one call."""

    def of_experts(self, table: Table, gemm: str, device: Device) -> "Choice":
        """This choice for a layer of experts, with how they are multiplied where that is not one by
        one anyway.
        """
        if self.backend != NATIVE.name:
            return self
        reason = grouped.why_not(table, gemm, device)
        if reason is None:
            how = "all experts in one product"
        else:
            how = f"a product per expert: {reason}"
        return Choice(self.backend, f"{self.why}; {how}", grouped=reason is None)


@dataclass(frozen=True)
class Request:
    """What a layer asks of the backends.

    Args:
        table: the operands of its three GEMMs.
        backend: "auto", or the name of a backend.
        device: device of the layer's input.
        cut: whether the layer is a shard; it then needs collectives between its GEMMs.
        fused: whether its weight shares a global scale with others.
        why_emulated: why only emulation and the reference run the recipe; None: others may.
    """

    table: Table
    layer: Shape
    backend: str
    device: Device
    cut: bool = False
    fused: bool = False
    why_emulated: str | None = None

    def choices(self) -> dict[str, Choice]:
        """The backend of each GEMM.

        "auto" takes Transformer Engine if it can run the whole table; else, per GEMM, native
        products on a GPU that has them (on a CPU they are slower than emulation), else emulation.
        A backend given by name runs every quantised GEMM, or ValueError is raised. GEMMs without
        quantised operands run on torch.

        Raises:
            ValueError: there is no such backend, or the named one cannot run the table; the message
                says why.
        """
        check_choice("backend", self.backend, CHOICES)
        if not self.table.quantised:
            return dict.fromkeys(GEMMS, Choice("torch", self.table.name))
        reason = f"backend={self.backend}"
        for name in LAYER_BACKENDS:
            if self.backend not in ("auto", name):
                continue
            why_not = self._why_not_together(name)
            if why_not is None:
                title = LAYER_BACKENDS[name].title
                why = f"{self.backend}: {title} runs this recipe on {self.device}"
                return dict.fromkeys(GEMMS, Choice(name, why))
            if self.backend == name:
                raise self._refusal(why_not)
            reason = f"auto: {why_not}"
        choices = {gemm: self._choice(gemm, reason) for gemm in GEMMS}
        if not self.layer.experts:
            return choices
        return {
            gemm: choice.of_experts(self.table, gemm, self.device)
            for gemm, choice in choices.items()
        }

    def _why_not_together(self, name: str) -> str | None:
        """Why a backend that runs the three GEMMs together does not run these; None: it does."""
        reasons = (
            _WHOLE if self.cut else None,
            LAYER_BACKENDS[name].why_not(self.table, self.layer, self.device),
            _OWN if self.fused else None,
            self.why_emulated,
            _ASKED if self.layer.experts and self.backend == "auto" else None,
        )
        return next(filter(None, reasons), None)

    def _why_not(self, backend: str, gemm: str) -> str | None:
        """Why a backend of single GEMMs does not run this one; None: it does."""
        if backend == NATIVE.name and self.why_emulated is not None:
            return self.why_emulated
        return BACKENDS[backend].why_not(self.table, gemm, self.layer, self.device)

    def _choice(self, gemm: str, reason: str) -> Choice:
        """The backend of one GEMM.

        Args:
            reason: why it is emulated, or which backend was asked for.
        """
        if not self.table[gemm].quantised:
            return Choice("torch", self.table.name)
        if self.backend == "auto":
            if self.device.type == "cuda" and self._why_not(NATIVE.name, gemm) is None:
                return Choice("native", "auto: the GPU multiplies these codes")
            return Choice("emulate", reason)
        why_not = self._why_not(self.backend, gemm)
        if why_not is not None:
            raise self._refusal(f"{gemm}: {why_not}")
        return Choice(self.backend, reason)

    def _refusal(self, why_not: str) -> ValueError:
        """The error of a backend that was asked for by name, with what would run instead."""
        choices = replace(self, backend="auto").choices().values()
        instead = sorted({choice.backend for choice in choices} - {"torch"})
        layer = self.layer
        return ValueError(
            f"backend={self.backend} cannot run {self.table.name} in {layer.name} "
            f"({layer.in_features}→{layer.out_features}) on "
            f"{self.device}: {why_not}. backend=auto would run it by {' and '.join(instead)}"
        )


def sums_note(operands: Operands, gemm: str, backend: str, device: Device) -> str:
    """Note on a product that tensor cores sum in their fast accumulator, behind its reason in a
    plan; "": it is not.
    """
    if not (8, 9) <= (device.capability or (0, 0)) < (10, 0):
        return ""
    if asks_fast_sums(operands, gemm, backend):
        return "; summed in 14 bits (fast accumulator)"
    return ""


def asks_fast_sums(operands: Operands, gemm: str, backend: str) -> bool:
    """Whether a backend asks tensor cores that have two accumulators for the fast one in this
    product.
    """
    if not operands.sums_fp8:
        return False
    if backend in LAYER_BACKENDS:
        return LAYER_BACKENDS[backend].sums_fast(operands, gemm)
    asked = operands.accumulator == "fast"
    return asked and BACKENDS[backend].summing("fast") is not BACKENDS[backend]


_WHOLE = (
    "it runs a layer's three GEMMs together, and tensor parallelism needs collectives between them"
)
_ASKED = "TE's GroupedLinear runs experts where backend=te asks for it"
_OWN = "it takes each weight's own amax, and the recipe's fused scales take that of several weights"
