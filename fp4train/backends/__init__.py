"""Backends execute the GEMMs: one per file, and the choice among them.

te               Transformer Engine's kernels, for a layer's three GEMMs together; only this folder uses TE
native           torch's scaled_mm on the codes
grouped          its scaled_grouped_mm, for several experts at once
emulate          decoded operands in BF16, exact products; runs everywhere. Also torch's GEMM, of high precision
reference        the same products, accumulated block by block as in TE's reference; slow
"""

from collections.abc import Mapping
from typing import NamedTuple

from fp4train.backends import grouped
from fp4train.backends.emulate import (
    EMULATE,
    TORCH,
    add_product as add_product,
    matmul as matmul,
    widened as widened,
    widens as widens,
)
from fp4train.backends.native import (
    NATIVE,
    Native as Native,
    cpu_multiplies_rows as cpu_multiplies_rows,
)
from fp4train.backends.protocol import (
    Backend as Backend,
    DataRanks as DataRanks,
    ExpertKernels as ExpertKernels,
    KernelCall as KernelCall,
    LayerBackend as LayerBackend,
    LayerKernels as LayerKernels,
    LayerState as LayerState,
    Multiplied as Multiplied,
    NotShownError as NotShownError,
    Prepared as Prepared,
    Readers as Readers,
    SavedTensor as SavedTensor,
)
from fp4train.backends.reference import REFERENCE
from fp4train.backends.table import (
    GEMMS as GEMMS,
    HIGH_PRECISION as HIGH_PRECISION,
    OPERANDS as OPERANDS,
    Operands as Operands,
    Shape as Shape,
    Table as Table,
    describe as describe,
    named as named,
    sourced as sourced,
)
from fp4train.backends.te import TRANSFORMER_ENGINE
from fp4train.backends.tensor_cores import (
    ADA_FP8 as ADA_FP8,
    BLACKWELL_FP4 as BLACKWELL_FP4,
    BLACKWELL_FP8 as BLACKWELL_FP8,
    HOPPER_FP8 as HOPPER_FP8,
    TensorCore as TensorCore,
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


def choose(
    table: Table,
    layer: Shape,
    backend: str,
    device: Device,
    *,
    cut: bool = False,
    fused: bool = False,
    emulated: str | None = None,
) -> dict[str, Choice]:
    """The backend of each GEMM of `table` in `layer` on `device`.

    "auto" takes Transformer Engine if it can run the whole table; else, per GEMM, native products
    on a GPU that has them (on a CPU they are slower than emulation), else emulation. A backend
    given by name runs every quantised GEMM, or ValueError is raised. GEMMs without quantised
    operands run on torch.

    Args:
        cut: whether the layer is a shard; it then needs collectives between its GEMMs.
        fused: whether its weight shares a global scale with others.
        emulated: why only emulation and the reference run the recipe; None: others may.

    Raises:
        ValueError: there is no such backend, or the named one cannot run the table; the message
            says why.
    """
    check_choice("backend", backend, CHOICES)
    if not table.quantised:
        return dict.fromkeys(GEMMS, Choice("torch", table.name))

    def refusal(why_not: str) -> ValueError:
        choices = choose(
            table, layer, "auto", device, cut=cut, fused=fused, emulated=emulated
        ).values()
        instead = sorted({choice.backend for choice in choices} - {"torch"})
        return ValueError(
            f"backend={backend} cannot run {table.name} in {layer.name} "
            f"({layer.in_features}→{layer.out_features}) on "
            f"{device}: {why_not}. backend=auto would run it by {' and '.join(instead)}"
        )

    reason = f"backend={backend}"
    for name, layer_backend in LAYER_BACKENDS.items():
        if backend not in ("auto", name):
            continue
        why_not = (
            _WHOLE
            if cut
            else layer_backend.why_not(table, layer, device) or (_OWN if fused else emulated)
        )
        if layer.experts and backend == "auto":
            why_not = why_not or _ASKED
        if why_not is None:
            return dict.fromkeys(
                GEMMS,
                Choice(name, f"{backend}: {layer_backend.title} runs this recipe on {device}"),
            )
        if backend == name:
            raise refusal(why_not)
        reason = f"auto: {why_not}"

    def of_gemm(gemm: str) -> Choice:
        if not table[gemm].quantised:
            return Choice("torch", table.name)
        if backend == "auto":
            native = (
                emulated is None
                and device.type == "cuda"
                and NATIVE.why_not(table, gemm, layer, device) is None
            )
            if native:
                return Choice("native", "auto: the GPU multiplies these codes")
            return Choice("emulate", reason)
        of_recipe = emulated if backend == "native" else None
        why_not = of_recipe or BACKENDS[backend].why_not(table, gemm, layer, device)
        if why_not is not None:
            raise refusal(f"{gemm}: {why_not}")
        return Choice(backend, reason)

    choices = {gemm: of_gemm(gemm) for gemm in GEMMS}
    if layer.experts:
        choices = {gemm: choice.of_experts(table, gemm, device) for gemm, choice in choices.items()}
    return choices


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
