"""A recipe's table of six operands → the TE recipe that computes exactly it, or why TE cannot.

The table decides, not the recipe's class: a `Custom` table that happens to be NVFP4 runs on TE's
`NVFP4BlockScaling`. Two ways, in this order:

1. one of TE's recipe classes, every switch set, so that TE's environment variables change nothing;
   with `backward_override="dequantized"` where backward takes the values of fprop's codes (2.20);
2. `CustomRecipe` with a quantiser for each form of each tensor (TE ≥ 2.19): high precision in
   single GEMMs, or different formats in forward and backward. TE's
   `backward_override="high_precision"` does not
   serve a quantised forward pass over an unquantised backward pass: it multiplies the weight in its
   own dtype, float32 by BF16.

A trap of TE that is handled here: `Float8CurrentScaling(use_power_2_scales=True)` and
`Float8BlockScaling(use_f32_scales=True)` have no effect, because TE reads
`fp8_quant_fwd_inp.power_2_scale` and its siblings, which are class attributes fixed at import.
"""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fp4train.backends.table import OPERANDS, Operands, Shape, Table
from fp4train.backends.te.availability import recipe_module, version, version_text, why_not_device
from fp4train.backends.te.quantizers import QuantizerFactory, family
from fp4train.formats import E4M3, E5M2
from fp4train.hardware import Device
from fp4train.quantize import Hadamard, QuantSpec, quantizer

INSTEAD = "use backend=emulate, which runs any table"
ALIGNMENT = {"nvfp4": 32, "mxfp8": 32, "fp8_current": 16, "fp8_delayed": 16, "fp8_block": 16}
"""Recipe of TE → divisor of in and out features that its kernels need; tokens are padded by
`TEExecutor`.
"""

NEWEST = (2, 20)
"""The TE that a GPU on another machine is taken to have."""
CODES = (2, 19)
"""The oldest TE whose linear layer, which takes codes of others, was read."""
DEQUANTISES = (2, 20)
"""The oldest TE whose `backward_override="dequantized"` was read."""
GROUPED = (2, 20)
"""The oldest TE whose GroupedLinear was read."""


def to_te(table: Table) -> Any:
    """The TE recipe that computes exactly `table`; None where nothing is quantised.

    Raises:
        ValueError: TE, or the installed version of it, cannot; the message names the operand and
            what to use instead.
    """
    if not table.quantised:
        return None
    te = recipe_module()
    table, override = overridden(table, version() or ())
    families = _families(table, version() or ())
    _check_products(table, families)
    _check_sums(table, families)
    kind = _native_kind(table, families)
    if kind is None:
        return _custom(te, table, families)
    return _native(te, table, kind, override)


def overridden(table: Table, installed: tuple[int, ...]) -> tuple[Table, str | None]:
    """(The table of TE's recipe, its `backward_override`): where dgrad and wgrad take the values of
    the codes that fprop multiplies, the table of a recipe whose fprop is the same.

    Raises:
        ValueError: TE has no such backward pass; the message names the operand and what to use
            instead.
    """
    gemms = [gemm for gemm in ("dgrad", "wgrad") if table[gemm].dequantised]
    if not gemms:
        return table, None
    where = f"{table.name}: {gemms[0]}: {OPERANDS[gemms[0]][1]}"
    if installed < DEQUANTISES:
        raise ValueError(
            f"{where} is the values of the codes that fprop multiplies, which needs TE "
            f"{'.'.join(map(str, DEQUANTISES))}, and this is {version_text()}; {INSTEAD}"
        )
    families = _families(table, installed)
    x, w = table["fprop"].both
    in_high_precision = table["dgrad"].first is None and table["wgrad"].first is None
    if x is None or w is None or len(gemms) == 1 or not in_high_precision:
        raise ValueError(
            f"{where}: TE takes the values of the codes that fprop multiplies for x and w "
            f"together, beside a dy in high precision; {INSTEAD}"
        )
    if "fp8_delayed" in families.values():
        raise ValueError(
            f"{where}: TE's delayed scaling has no dequantised backward; use FP8Current, or "
            f"{INSTEAD}"
        )
    if families[x] == "nvfp4":
        dy = QuantSpec(formula=x.formula)
    else:
        dy = x
    quantised = dataclasses.replace(
        table, dgrad=Operands(first=dy, second=w), wgrad=Operands(first=dy, second=x)
    )
    in_class = x.global_scale != "row" and _native_kind(quantised, families | {dy: families[x]})
    if not in_class:
        raise ValueError(
            f"{where}: TE's dequantised backward is run for its recipe classes, and none has this "
            f"fprop; {INSTEAD}"
        )
    return quantised, "dequantized"


def dequantises(table: Table) -> bool:
    """Whether the backward passes of a table that TE runs take the values of fprop's codes."""
    return table["dgrad"].dequantised


def shares_codes(table: Table, *, here: bool = True) -> bool:
    """Whether layers that read one x can take one quantised copy of it and keep every bit.

    Not of delayed scaling, where x enters the history of each layer, and of quantisers that are
    ours, whose tensors are of another kind; and from TE 2.19 on, whose linear layer was read.

    Args:
        here: with the TE of this machine; else with the newest one.
    """
    installed = (version() or ()) if here else NEWEST
    return installed >= CODES and _class_kind(table, installed) not in (None, "fp8_delayed")


@lru_cache(maxsize=64)
def _class_kind(table: Table, installed: tuple[int, ...]) -> str | None:
    """The family of TE's recipe class for this table, which a plan asks for each of its layers."""
    table, _ = overridden(table, installed)
    return _native_kind(table, _families(table, installed))


def why_values(table: Table, layer: Shape, device: Device) -> str | None:
    """Why TE's layer takes no codes of its weight that fp4train's kernels made; None: it does
    (weights.py).
    """
    installed = (version() or ()) if device.here else NEWEST
    if layer.experts:
        return "Transformer Engine's GroupedLinear quantises the weights itself"
    if any(spec.delayed is not None for spec in table.specs()):
        return (
            "Transformer Engine enters the amax of the weight into its history of delayed scaling"
        )
    if installed < CODES:
        return (
            f"{version_text()} takes no codes of a weight: {'.'.join(map(str, CODES))} is the "
            "oldest that does"
        )
    if not (device.here and device.type == "cuda"):
        return None
    for spec in (table["fprop"].second, table["dgrad"].second):
        if spec is not None and (our_quantizer := quantizer(spec, device.type)).why is not None:
            return (
                "Transformer Engine quantises the weight, since no kernel of fp4train does "
                f"({our_quantizer.why})"
            )
    return None


def why_not(table: Table, layer: Shape, device: Device) -> str | None:
    """None when TE runs exactly this table on `device` in a layer of this size; otherwise the
    reason.

    The number of tokens does not matter: `TEExecutor` pads it with zeros, which change neither amax
        nor product.
    """
    if not table.quantised:
        return None
    if (reason := why_not_device(table, device)) is not None:
        return reason
    try:
        if device.here:
            to_te(table)
        installed = (version() or ()) if device.here else NEWEST
        experts_override = layer.experts and dequantises(table)
        table, _ = overridden(table, installed)
        families = _families(table, installed)
        _check_products(table, families)
        _check_sums(table, families)
    except ValueError as error:
        return str(error)
    multiple = max(ALIGNMENT[kind] for kind in families.values())
    for name, size in (("in_features", layer.in_features), ("out_features", layer.out_features)):
        if size % multiple:
            return f"TE needs {name} divisible by {multiple}, not {size}"
    if experts_override:
        return f"TE's GroupedLinear is not given a dequantised backward; {INSTEAD}"
    if layer.experts:
        return _why_not_experts(table, families, device)
    return None


def _why_not_experts(table: Table, families: Mapping[QuantSpec, str], device: Device) -> str | None:
    """Why TE's GroupedLinear does not run this table; None if it does."""
    installed = (version() or ()) if device.here else NEWEST
    if installed < GROUPED:
        return f"experts need TE {'.'.join(map(str, GROUPED))}, and this is {version_text()}"
    if len(set(families.values())) != 1 or not all(
        operands.quantised for operands in table.values()
    ):
        return "TE's GroupedLinear takes TE's own recipes: one format in all three GEMMs"
    if any(spec.delayed is not None for spec in table.specs()):
        return "the histories of delayed scaling are those of a layer with one weight"
    if any(spec.global_scale == "row" for spec in table.specs()):
        return "TE's GroupedLinear takes one global scale per expert"
    if device.here and to_te(table).custom():
        return "TE's recipe of this table is one of quantisers"
    return None


def _families(table: Table, installed: tuple[int, ...]) -> dict[QuantSpec, str]:
    """TE's family of each distinct operand."""
    family_of = {}
    for gemm, operands in table.items():
        for name, spec in zip(OPERANDS[gemm], (operands.first, operands.second), strict=True):
            if spec is None:
                continue
            where = f"{table.name}: {gemm} {name}"
            try:
                family_of[spec] = family(spec)
            except ValueError as error:
                raise ValueError(f"{where}: {error}; {INSTEAD}") from error
            newer = installed >= (2, 14)
            if family_of[spec] == "nvfp4" and (spec.formula == "te2.14") != newer:
                here = "te2.14" if newer else "te2.13"
                raise ValueError(
                    f"{where}: {version_text()} computes NVFP4 block scales by formula={here}, "
                    f"not {spec.formula}; set recipe.formula={here} or {INSTEAD}"
                )
            if family_of[spec] == "nvfp4" and table.dtype == "float16":
                raise ValueError(
                    f"{where}: TE's NVFP4 products have no float16 output "
                    f"(recipe.dtype=bfloat16); {INSTEAD}"
                )
            if spec.hadamard is not None and table.dtype != "bfloat16":
                raise ValueError(f"{where}: TE transforms BF16, not {table.dtype}; {INSTEAD}")
            if gemm != "wgrad" and spec.hadamard is not None:
                raise ValueError(f"{where}: TE transforms the wgrad operands only; {INSTEAD}")
            if gemm != "fprop" and spec.global_scale == "row":
                raise ValueError(
                    f"{where}: TE is given row-wise global scales in fprop alone; {INSTEAD}"
                )
    return family_of


def _check_products(table: Table, families: Mapping[QuantSpec, str]) -> None:
    """TE multiplies two operands of one family, or two unquantised ones."""
    for gemm, operands in table.items():
        a_spec = operands.first
        b_spec = operands.second
        if a_spec is None and b_spec is None:
            continue
        names = OPERANDS[gemm]
        if a_spec is None or b_spec is None:
            plain, quantised = names if a_spec is None else names[::-1]
            raise ValueError(
                f"{table.name}: {gemm}: {quantised} is quantised and {plain} is not, which no "
                "TE kernel multiplies; "
                f"quantise both or none, or {INSTEAD}"
            )
        if families[a_spec] != families[b_spec]:
            raise ValueError(
                f"{table.name}: {gemm}: {names[0]} is {families[a_spec]} and {names[1]} is "
                f"{families[b_spec]}, "
                f"which no TE kernel multiplies; give both the same format, or {INSTEAD}"
            )
        if a_spec.format == b_spec.format == E5M2:
            raise ValueError(
                f"{table.name}: {gemm}: TE multiplies no two E5M2 operands; use E4M3 for one, "
                f"or {INSTEAD}"
            )
        if families[a_spec] == "fp8_block" and a_spec.block == b_spec.block == (128, 128):
            raise ValueError(
                f"{table.name}: {gemm}: TE multiplies 128×128 blocks by 1×128 ones only; {INSTEAD}"
            )


def _check_sums(table: Table, families: Mapping[QuantSpec, str]) -> None:
    """Only current scaling among TE's recipes has a choice of accumulators (`fp8_gemm_fprop` and
    its siblings): others sum fprop in the fast one, dgrad and wgrad in the exact one
    (module/base.py _2X_ACC_FPROP and its siblings).
    """
    if set(families.values()) == {"fp8_current"} and all(
        operands.quantised for operands in table.values()
    ):
        return
    for gemm, operands in table.items():
        if operands.accumulator not in ("auto", "fast" if gemm == "fprop" else "exact"):
            raise ValueError(
                f"{table.name}: {gemm}: TE has accumulator={operands.accumulator!r} for "
                "FP8Current with all GEMMs "
                "quantised only; use accumulator='auto', or backend=native"
            )


def _native_kind(table: Table, families: Mapping[QuantSpec, str]) -> str | None:
    """The family that one of TE's recipe classes has in all operands of this table; None: there is
    no such class.
    """
    x = table["fprop"].first
    w = table["fprop"].second
    dy = table["dgrad"].first
    if len(set(families.values())) != 1 or x is None or w is None or dy is None:
        return None
    kind = families[x]
    if kind == "nvfp4":
        return kind if _is_nvfp4(table, x, w, dy) else None
    by_tensor = {
        "fprop": Operands(first=x, second=w),
        "dgrad": Operands(first=dy, second=w),
        "wgrad": Operands(first=dy, second=x),
    }
    plain = {
        gemm: dataclasses.replace(operands, accumulator="auto") for gemm, operands in table.items()
    }
    if plain != by_tensor or x.format != E4M3 or w.format != E4M3:
        return None
    if kind == "fp8_delayed":
        if x.delayed is not None and all(o.delayed == x.delayed for o in (w, dy)):
            return kind
        return None
    if kind != "mxfp8" and any(o.scale != x.scale for o in (w, dy)):
        return None
    blocks = {"mxfp8": (1, 32), "fp8_block": (1, 128)}
    if all(operands.block == blocks.get(kind, operands.block) for operands in (x, dy)):
        return kind
    return None


def _native(te: Any, table: Table, kind: str, override: str | None) -> Any:
    """The recipe of TE's class for a table of this family (`_native_kind`), with this
    `backward_override`.
    """
    x = table["fprop"].first
    w = table["fprop"].second
    dy = table["dgrad"].first
    assert x is not None and w is not None and dy is not None
    if kind == "nvfp4":
        return _nvfp4(te, table, x, w, dy, override)
    fields: dict[str, Any] = {
        "fp8_format": te.Format.HYBRID if dy.format == E5M2 else te.Format.E4M3,
        "backward_override": override,
        "fp8_dpa": False,
        "fp8_mha": False,
    }
    if kind == "mxfp8":
        return _make(
            te.MXFP8BlockScaling, **fields, margin=0, enable_2d_quantization=w.block == (32, 32)
        )
    if x.delayed is not None:
        return _make(
            te.DelayedScaling,
            **fields,
            margin=x.delayed.margin,
            amax_history_len=x.delayed.history,
            amax_compute_algo=x.delayed.algorithm,
            scaling_factor_compute_algo=None,
            reduce_amax=True,
        )
    if kind == "fp8_current":
        for gemm, operands in table.items():
            if operands.accumulator != "auto":
                fields[f"fp8_gemm_{gemm}"] = te.MMParams(
                    use_split_accumulator=operands.accumulator == "exact"
                )
        te_recipe = _make(te.Float8CurrentScaling, **fields, use_power_2_scales=x.scale == "pow2")
    else:
        te_recipe = _make(
            te.Float8BlockScaling,
            **fields,
            use_f32_scales=x.scale == "fp32",
            x_block_scaling_dim=1,
            w_block_scaling_dim=2 if w.block == (128, 128) else 1,
            grad_block_scaling_dim=1,
        )
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(te_recipe, name, te.QParams(power_2_scale=x.scale == "pow2", amax_epsilon=0.0))
    return te_recipe


def _is_nvfp4(table: Table, x: QuantSpec, w: QuantSpec, dy: QuantSpec) -> bool:
    """Whether NVFP4BlockScaling has the combination of switches that this table shows."""
    wgrad_x = table["wgrad"].second
    if wgrad_x is None:
        return False
    transform = wgrad_x.hadamard
    expected = {
        "fprop": Operands(first=x, second=w),
        "dgrad": Operands(first=dy, second=w),
        "wgrad": Operands(
            first=dataclasses.replace(dy, hadamard=transform),
            second=dataclasses.replace(x, hadamard=transform),
        ),
    }
    # TE never gives gradients four-over-six, and scales them by tensor.
    plain = dy.block == (1, 16) and dy.four_over_six is None and dy.hadamard is None
    if (
        dict(table) != expected
        or not plain
        or x.global_scale == "row"
        or transform not in (None, Hadamard())
    ):
        return False
    if x.block != (1, 16) or any(s.rounding != "nearest" or s.hadamard is not None for s in (x, w)):
        return False
    both = x.four_over_six is not None and w.four_over_six is not None
    return w.global_scale != "row" and (not both or x.four_over_six == w.four_over_six)


def _nvfp4(
    te: Any, table: Table, x: QuantSpec, w: QuantSpec, dy: QuantSpec, override: str | None
) -> Any:
    """NVFP4BlockScaling with the switches that this table shows, and this `backward_override`."""
    scopes = {
        (False, False): "none",
        (False, True): "weights",
        (True, False): "activations",
        (True, True): "all",
    }
    chosen = scopes[x.four_over_six is not None, w.four_over_six is not None]
    bounded = scopes[x.global_bound == 256, w.global_bound == 256]
    return _make(
        te.NVFP4BlockScaling,
        disable_rht=table["wgrad"].second.hadamard is None,  # type: ignore[union-attr]
        disable_stochastic_rounding=dy.rounding == "nearest",
        disable_2d_quantization=w.block == (1, 16),
        row_scaled_activation=False,
        nvfp4_4over6=chosen,
        # Without four-over-six TE ignores the bound; its default then keeps older versions usable.
        nvfp4_4over6_e4m3_use_256="all" if chosen == "none" else bounded,
        nvfp4_4over6_err_mode=(x.four_over_six or w.four_over_six or "mae").upper(),
        fp4_format=te.Format.E2M1,
        fp8_format=te.Format.E4M3,
        fp8_dpa=False,
        fp8_mha=False,
        backward_override=override,
    )


def _custom(te: Any, table: Table, families: Mapping[QuantSpec, str]) -> Any:
    """A CustomRecipe with one quantiser for each form of each tensor."""
    if (version() or ()) < (2, 19):
        raise ValueError(
            f"{table.name} needs Transformer Engine 2.19 or newer (CustomRecipe with a "
            "quantiser for each direction), "
            f"and this is {version_text()}; {INSTEAD}"
        )
    if "fp8_delayed" in families.values():
        raise ValueError(
            f"{table.name}: TE's delayed scaling holds for all six operands, E4M3 forward, "
            "with one history; "
            f"use FP8Current, or {INSTEAD}"
        )
    factory = QuantizerFactory.of(table)
    return _make(
        te.CustomRecipe,
        qfactory=factory,
        fp8_format=te.Format.HYBRID,  # of no effect here: the factory decides
        backward_override=None,
        fp8_dpa=False,
        fp8_mha=False,
        quantization_alignment=128,
    )


_NEUTRAL = {
    "backward_override": None,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
    "enable_2d_quantization": False,
    "quantization_alignment": 128,
}
"""Fields that came with a later TE, and the value that an older one stands for."""


def _make(cls: Any, **options: Any) -> Any:
    """`cls(**wanted)`, without the fields that the installed TE does not know yet and that say
    nothing new.
    """
    te_fields = {field.name for field in dataclasses.fields(cls)}
    missing = {name: value for name, value in options.items() if name not in te_fields}
    for name, value in missing.items():
        if _NEUTRAL.get(name, options) != value:
            raise ValueError(
                f"{version_text()} has no {cls.__name__}({name}={value!r}): update it, or {INSTEAD}"
            )
    return cls(**{name: value for name, value in options.items() if name in te_fields})
