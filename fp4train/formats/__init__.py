"""Number formats: codes <-> values, and packing. Independent of blocks and scaling."""

from fp4train.formats.element import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FP16,
    FP32,
    WIDE_FORMATS,
    ElementFormat,
    decode,
    encode,
    value_table,
)
from fp4train.formats.packing import pack_fp4, pack_fp6, unpack_fp4, unpack_fp6
from fp4train.formats.registry import ELEMENT_FORMATS, SCALE_FORMATS, get_format, get_scale_format
from fp4train.formats.scale import ScaleFormat, e4m3_decode, e4m3_encode, e8m0_decode, e8m0_encode
from fp4train.formats.table import FormatRow, formats_table

__all__ = [
    "BF16",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "ELEMENT_FORMATS",
    "FP16",
    "FP32",
    "SCALE_FORMATS",
    "WIDE_FORMATS",
    "ElementFormat",
    "FormatRow",
    "ScaleFormat",
    "decode",
    "e4m3_decode",
    "e4m3_encode",
    "e8m0_decode",
    "e8m0_encode",
    "encode",
    "formats_table",
    "get_format",
    "get_scale_format",
    "pack_fp4",
    "pack_fp6",
    "unpack_fp4",
    "unpack_fp6",
    "value_table",
]
