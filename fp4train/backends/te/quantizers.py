"""One quant spec → the TE quantiser that computes exactly it; two of them → the quantiser of a
tensor.

TE quantises a tensor once into two forms: row-wise, blocked along its last axis, and column-wise,
blocked along its first (stored transposed). The six operands of a linear layer are these forms of
three tensors:

    tensor       row-wise        column-wise
    input        fprop  x        wgrad  x
    weight       fprop  w        dgrad  w
    grad_output  dgrad  dy       wgrad  dy

Where one TE quantiser emits both forms it is used; otherwise TE ≥ 2.19's `HybridQuantizer` joins
two, one of which may be the `IdentityQuantizer` (high precision). Both are handed to TE through the
factory of a `CustomRecipe`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fp4train.backends.table import DTYPES, FORMS, Table, describe
from fp4train.formats import E2M1, E4M3, E5M2
from fp4train.quantize import Hadamard, QuantSpec
from fp4train.quantize.outer import describe_global

SLOTS = {"input": FORMS["x"], "weight": FORMS["w"], "grad_output": FORMS["dy"]}
"""TE's name of each tensor → (GEMM, operand) of its row-wise and of its column-wise form."""

FormSpecs = tuple[QuantSpec | None, QuantSpec | None]
"""The row-wise and the column-wise form of a tensor; None is high precision."""


def family(spec: QuantSpec) -> str:
    """TE's name for the way `spec` quantises: "nvfp4", "mxfp8", "fp8_current", "fp8_delayed" or
    "fp8_block".

    Raises:
        ValueError: TE has no quantiser that computes exactly this; the message says what stands in
            the way.
    """
    if spec.held is not None:
        raise ValueError(
            f"TE measures a tensor's amax in every step, and held={spec.held} does not"
        )
    if spec.format == E2M1 and spec.scale == "e4m3":
        _check_nvfp4(spec)
        return "nvfp4"
    if spec.requantises is not None:
        raise ValueError("TE has no requantised operands")
    if spec.global_scale is not None:
        raise ValueError(
            f"TE has no {describe_global(spec.global_scale)} scales above those of {spec.scale}"
        )
    if spec.format in (E4M3, E5M2):
        if spec.rounding != "nearest":
            raise ValueError("TE rounds FP8 to nearest only")
        if spec.hadamard is not None:
            raise ValueError("TE applies the Hadamard transform to NVFP4 operands only")
        if spec.scale == "e8m0" and spec.block in ((1, 32), (32, 32)):
            if spec.scale_rounding not in (None, "rceil"):
                raise ValueError(
                    f"TE rounds E8M0 scales up (scale_rounding=rceil), not by {spec.scale_rounding}"
                )
            return "mxfp8"
        if spec.scale in ("fp32", "pow2"):
            if spec.block == (None, None):
                if spec.delayed is None:
                    return "fp8_current"
                if spec.scale == "pow2":
                    raise ValueError("TE's delayed scaling has no power-of-two scales")
                return "fp8_delayed"
            if spec.block in ((1, 128), (128, 128)):
                return "fp8_block"
    raise ValueError(f"TE has no quantiser for {', '.join(describe(spec)[:3])}")


def _check_nvfp4(spec: QuantSpec) -> None:
    two_d = spec.block == (16, 16)
    unsupported = spec.hadamard is not None and not (
        isinstance(spec.hadamard, Hadamard)
        and spec.hadamard.size == 16
        and spec.hadamard.signs in ("fixed", "none")
    )
    stochastic = spec.rounding == "stochastic"
    transformed = spec.hadamard is not None
    if spec.rounding not in ("nearest", "stochastic") or spec.requantises is not None:
        raise ValueError(f"TE has neither rounding={spec.rounding!r} nor requantised operands")
    if spec.block not in ((1, 16), (16, 16)):
        raise ValueError(f"TE's NVFP4 blocks are 1×16 or 16×16, not {spec.block}")
    if unsupported:
        raise ValueError(
            f"TE's Hadamard transform has size 16 and fixed or no signs, not {spec.hadamard}"
        )
    if two_d and (stochastic or transformed):
        raise ValueError("TE's 16×16 blocks are rounded to nearest without a Hadamard transform")
    if spec.guard != 1.0:
        raise ValueError(f"TE has no guarded scale (guard={spec.guard:.4g})")
    if spec.global_scale not in ("tensor", "row") or spec.chunks is not None:
        raise ValueError("TE's NVFP4 has a global scale, for each tensor or each row")
    if spec.global_scale == "row" and (two_d or stochastic or transformed):
        raise ValueError(
            "TE's row-wise global scale goes with 1×16 blocks, nearest rounding and no "
            "Hadamard transform"
        )
    if spec.four_over_six and (stochastic or transformed):
        raise ValueError("TE's four-over-six goes with nearest rounding and no Hadamard transform")
    if spec.global_bound != 448.0 and not spec.four_over_six:
        raise ValueError(
            f"TE bounds the global scale by 448 without four-over-six, not by {spec.global_bound:g}"
        )


def joint(row: QuantSpec | None, column: QuantSpec | None) -> bool:
    """Whether one TE quantiser emits both forms. NVFP4's transforms the column-wise form only."""
    if row is None or column is None:
        return row is column
    if row.global_scale == "row":
        return False  # TE would scale the column-wise form row by row too
    return row == (replace(column, hadamard=None) if family(row) == "nvfp4" else column)


def forms(table: Table) -> dict[str, FormSpecs]:
    """The row-wise and column-wise form of each of TE's tensors."""

    def form(gemm: str, operand: str) -> QuantSpec | None:
        spec: QuantSpec | None = getattr(table[gemm], operand)
        return spec

    return {slot: (form(*row), form(*column)) for slot, (row, column) in SLOTS.items()}


@dataclass(frozen=True, kw_only=True)
class QuantizerFactory:
    """Quantisers for TE's `CustomRecipe(qfactory=…)`, which calls this for each tensor of a layer;
    equal tables make equal factories.

    Args:
        input, weight, grad_output: the forms of each tensor.
        dtype: dtype of forms in high precision. TE multiplies what it is given, and weights are
            float32 in most runs.
    """

    input: FormSpecs
    weight: FormSpecs
    grad_output: FormSpecs
    dtype: str

    @classmethod
    def of(cls, table: Table) -> QuantizerFactory:
        return cls(**forms(table), dtype=table.dtype)

    def __call__(self, role: Any) -> Any:
        """A TE quantiser.

        Args:
            role: TE's QuantizerRole. Other slots than input, weight and grad_output belong to
                quantised outputs, which fp4train never asks for; they get the identity.
        """
        import transformer_engine.pytorch as te

        kind = getattr(role, "tensor_type", "")
        row, column = getattr(self, kind) if kind in SLOTS else (None, None)
        if not joint(row, column):
            return te.HybridQuantizer(
                rowwise_quantizer=quantizer(row, self.dtype),
                columnwise_quantizer=quantizer(column, self.dtype),
            )
        # The column-wise form carries the transform, which TE leaves out row-wise.
        return quantizer(column, self.dtype)


def quantizer(spec: QuantSpec | None, dtype_in_high_precision: str) -> Any:
    import transformer_engine.pytorch as te

    if spec is None:
        return te.IdentityQuantizer(dtype=DTYPES[dtype_in_high_precision])
    kind = family(spec)
    if kind == "nvfp4":
        transformed = spec.hadamard is not None
        return te.NVFP4Quantizer(
            with_rht=transformed,
            with_post_rht_amax=transformed,
            with_2d_quantization=spec.block == (16, 16),
            stochastic_rounding=spec.rounding == "stochastic",
            row_scaled_nvfp4=spec.global_scale == "row",
            nvfp4_use_4over6=spec.four_over_six is not None,
            nvfp4_e4m3_max=int(spec.global_bound),
            nvfp4_4over6_err_mode=(spec.four_over_six or "mae").upper(),
            with_random_sign_mask=not isinstance(spec.hadamard, Hadamard)
            or spec.hadamard.signs == "fixed",
        )
    dtype = element_dtype(spec)
    if kind == "mxfp8":
        return te.MXFP8Quantizer(dtype, with_2d_quantization=spec.block == (32, 32))
    if kind == "fp8_current":
        return te.Float8CurrentScalingQuantizer(
            dtype, device="cuda", force_pow_2_scales=spec.scale == "pow2"
        )
    assert kind == "fp8_block", (
        "delayed scaling has state and comes as a recipe of its own, not as a quantiser"
    )
    return te.Float8BlockQuantizer(
        fp8_dtype=dtype,
        rowwise=True,
        columnwise=True,
        force_pow_2_scales=spec.scale == "pow2",
        block_scaling_dim=2 if spec.block == (128, 128) else 1,
    )


def element_dtype(spec: QuantSpec) -> Any:
    """TE's dtype of the codes."""
    from transformer_engine.pytorch.constants import DType

    return {E2M1: DType.kFloat4E2M1, E4M3: DType.kFloat8E4M3, E5M2: DType.kFloat8E5M2}[spec.format]
