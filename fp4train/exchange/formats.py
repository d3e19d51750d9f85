"""The quantised formats of other software: which operands of fprop they are, and how a folder names
and describes them.

| weights, activations | compressed-tensors | ModelOpt |
|---|---|---|
| NVFP4, NVFP4 | `nvfp4-pack-quantized` | `NVFP4` |
| NVFP4, high precision | `nvfp4-pack-quantized` | `W4A16_NVFP4` |
| MXFP8, MXFP8 | `mxfp8-quantized` | `MXFP8` |
| MXFP4, MXFP4 | `mxfp4-pack-quantized` | - |
| FP8, FP8 | `float-quantized`, tensor | `FP8` |
| FP8 rows, FP8 rows | `float-quantized`, channel | `FP8_PER_CHANNEL_PER_TOKEN` |
| FP8 128×128, FP8 1×128 | `float-quantized`, block | - |

Both store codes row by row, two E2M1 codes in a byte with the first one in the low nibble, and
block scales that are not swizzled, one for each row: 16×16 blocks repeat theirs 16 times.
compressed-tensors DIVIDES by its global scale, 2688/amax; ModelOpt MULTIPLIES by amax/2688.
(Sources: compressed-tensors 0.20, `quantization/quant_scheme.py` and `compressors`; ModelOpt 0.47,
`torch/export/quant_utils.py`.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp4train import __version__
from fp4train.formats import E2M1, E4M3
from fp4train.quantize import QuantSpec
from fp4train.quantize.outer import describe_global
from fp4train.quantize.scaling import element_range

HIGH = "high precision"
COMPRESSED_TENSORS = "compressed-tensors"
MODELOPT = "modelopt"
LAYOUTS = (COMPRESSED_TENSORS, MODELOPT)

_VERSION = "0.20.0"
"""The version of compressed-tensors whose layout this is."""


def _args(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        **more,
    }


def _scaled(bits: int, strategy: str, size: int, dtype: str, **more: Any) -> dict[str, Any]:
    return _args(bits, strategy, group_size=size, scale_dtype=dtype, zp_dtype=dtype, **more)


_NVFP4 = (4, "tensor_group", 16, "torch.float8_e4m3fn")
_MX = ("group", 32, "torch.uint8")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How other software stores a weight and quantises the activations that meet it.

    Args:
        weight, x: kinds of the two operands of fprop (`kind_of`).
        compressed: name of the format in compressed-tensors, and the arguments of its two operands.
        modelopt: entries of ModelOpt's configuration; None: it has no such format.
        static: True: a scale of the activations is stored.
        modelopt_experts: True: ModelOpt's folders have it for experts, too: vLLM's
            `ModelOptFp8MoEMethod` takes one scale per weight, also where `quant_algo` says that
            rows have their own.
        group: number of in features that share a scale, a divisor of the layer's; 1: any number.
        x_group: number of values of an activation that share a scale, a divisor of the layer's in
            features, as kernels that quantise them ask; 1: any number.
    """

    weight: str
    x: str
    compressed: tuple[str, dict[str, Any], dict[str, Any] | None]
    modelopt: dict[str, Any] | None
    static: bool = False
    modelopt_experts: bool = True
    group: int = 1
    x_group: int = 1

    @property
    def name(self) -> str:
        if self.weight == self.x:
            return self.weight
        return f"{self.weight} with activations in {self.x}"

    @property
    def block_scaled(self) -> bool:
        """Whether the scales are bytes of blocks."""
        return self.group > 1


FORMATS = (
    Format(
        weight="NVFP4",
        x="NVFP4",
        compressed=(
            "nvfp4-pack-quantized",
            _scaled(*_NVFP4),
            _scaled(*_NVFP4) | {"dynamic": "local"},
        ),
        modelopt={"quant_algo": "NVFP4", "group_size": 16},
        static=True,
        group=16,
    ),
    Format(
        weight="NVFP4",
        x=HIGH,
        compressed=("nvfp4-pack-quantized", _scaled(*_NVFP4), None),
        modelopt={"quant_algo": "W4A16_NVFP4", "group_size": 16},
        group=16,
    ),
    Format(
        weight="MXFP8",
        x="MXFP8",
        compressed=("mxfp8-quantized", _scaled(8, *_MX), _scaled(8, *_MX) | {"dynamic": True}),
        modelopt={"quant_algo": "MXFP8", "group_size": 32},
        group=32,
    ),
    Format(
        weight="MXFP4",
        x="MXFP4",
        compressed=("mxfp4-pack-quantized", _scaled(4, *_MX), _scaled(4, *_MX) | {"dynamic": True}),
        modelopt=None,
        group=32,
    ),
    Format(
        weight="FP8",
        x="FP8",
        compressed=("float-quantized", _args(8, "tensor"), _args(8, "tensor")),
        modelopt={"quant_algo": "FP8"},
        static=True,
    ),
    Format(
        weight="FP8 rows",
        x="FP8 rows",
        compressed=("float-quantized", _args(8, "channel"), _args(8, "token") | {"dynamic": True}),
        modelopt={"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        modelopt_experts=False,
    ),
    Format(
        weight="FP8 128×128",
        x="FP8 1×128",
        compressed=(
            "float-quantized",
            _args(8, "block", block_structure=[128, 128]),
            _args(8, "group", group_size=128) | {"dynamic": True},
        ),
        modelopt=None,
        x_group=128,
    ),
)


def kind_of(spec: QuantSpec | None) -> str:
    """The name by which `FORMATS` knows an operand.

    Raises:
        ValueError: no format of other software has it; the message says why, without the operand's
            name.
    """
    if spec is None:
        return HIGH
    if spec.random:
        raise ValueError(f"is rounded by rounding={spec.rounding}: its codes are those of one step")
    if spec.rounding != "nearest":
        raise ValueError(
            f"is rounded by rounding={spec.rounding}: other software rounds activations to nearest"
        )
    if spec.delayed is not None:
        raise ValueError(
            "takes its scale from a history (delayed scaling), and a folder has that of the tensor"
        )
    if spec.held is not None:
        raise ValueError(
            f"holds its scale for {spec.held} steps (held), and a folder has that of the tensor"
        )
    if spec.hadamard is not None or spec.requantises is not None:
        raise ValueError("is transformed before it is quantised")
    if element_range(spec) != spec.format.max:
        raise ValueError(f"leaves a guard of its range free (guard={spec.guard:g})")
    rows, columns = spec.block
    shared = rows in (1, columns)
    nvfp4 = (E2M1, "e4m3", "tensor", 16)
    if shared and (spec.format, spec.scale, spec.global_scale, columns) == nvfp4:
        return "NVFP4"
    if (
        (spec.scale, spec.global_scale, columns) == ("e8m0", None, 32)
        and spec.format in (E4M3, E2M1)
        and shared
    ):
        if spec.format == E4M3:
            return "MXFP8"
        return "MXFP4"
    if spec.format == E4M3 and spec.scale in ("fp32", "pow2"):
        names = {
            (None, None): "FP8",
            (1, None): "FP8 rows",
            (128, 128): "FP8 128×128",
            (1, 128): "FP8 1×128",
        }
        if (rows, columns) in names:
            return names[rows, columns]
    scale = f"{spec.scale} scales"
    if spec.global_scale:
        scale += f" under {describe_global(spec.global_scale)}"
    raise ValueError(
        f"is {spec.element} in blocks {spec.block} with {scale}, which is none of their formats"
    )


def format_of(
    weight: QuantSpec | None, x: QuantSpec | None, layout: str, *, experts: bool = False
) -> Format | None:
    """The format of a layer whose fprop has these operands; None: its weight is in high precision.

    Args:
        experts: True: the layer is a group of experts.

    Raises:
        ValueError: `layout` has none; the message says why.
    """
    if weight is None:
        return None
    kinds = []
    if x is not None and x.global_scale == "row":  # servers take one scale of the tensor
        x = replace(x, global_scale="tensor")
    for what, spec in (("the weight", weight), ("the activation", x)):
        try:
            kinds.append(kind_of(spec))
        except ValueError as error:
            raise ValueError(f"{what} {error}") from error
    form = next(
        (candidate for candidate in FORMATS if [candidate.weight, candidate.x] == kinds), None
    )
    if form is None:
        raise ValueError(
            f"weights in {kinds[0]} with activations in {kinds[1]} are none of their formats"
        )
    if layout == MODELOPT and form.modelopt is None:
        raise ValueError(f"ModelOpt's folders have no {form.name}; to=compressed-tensors has it")
    if layout == MODELOPT and experts and not form.modelopt_experts:
        raise ValueError(
            f"ModelOpt's folders have no {form.name} for experts; to=compressed-tensors has it"
        )
    return form


def configuration(form: Format, layout: str, kept: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json.

    Args:
        kept: names of the linear modules in high precision.
    """
    if layout == MODELOPT:
        return {
            "quant_method": "modelopt",
            **modelopt_configuration(form, kept)["quantization"],
            "ignore": [*kept],
        }
    name, weight, x = form.compressed
    group = {
        "targets": ["Linear"],
        "weights": weight,
        "input_activations": x,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": [*kept],
        "config_groups": {"group_0": {**group, "format": name}},
        "version": _VERSION,
    }


def modelopt_configuration(form: Format, kept: Sequence[str]) -> dict[str, Any]:
    """`hf_quant_config.json` of ModelOpt's folders."""
    assert form.modelopt is not None
    algorithm: Mapping[str, Any] = {
        **form.modelopt,
        "kv_cache_quant_algo": None,
        "exclude_modules": [*kept],
    }
    return {
        "producer": {"name": "fp4train", "version": __version__},
        "quantization": dict(algorithm),
    }
