"""Make the reduced set of golden vectors in this folder from the full one: `python
tests/golden/reduce.py FULL`.

Cases are kept whole, with all of their variants, so files, keys and metadata read as those of the
full set. The same input gives the same bytes.
"""

import json
import struct
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

HERE = Path(__file__).parent

CASES = {
    # Every kind in BF16 (which has all variants); float32 where its range or precision tells; one
    # larger tensor.
    "nvfp4_reference": "q0 q4 q8 q12 q16 q20 q24 q28 q32 q36 q1 q5 q13 q17 q6 gemm0",
    # normal, outliers and tiny in float32; huge, blocks of zeros and the grid of the formats in
    # BF16
    "mx_reference": "m1 m3 m7 m8 m14 m16",
    # rows of mixed magnitudes, zeros, tiny; 144×136 fills neither 128×128 blocks nor rows of 128
    "fp8_reference": "f4 f6 f9",
    # whole tiles; rows, then columns that do not fill a tile
    "nvfp4_layout_reference": "l0 l1 l2",
}


def reduced(path: Path, cases: set[str]) -> bytes:
    """The file at `path` with these cases alone."""
    with safe_open(path, "pt") as file:
        tensors = {
            name: file.get_tensor(name)
            for name in sorted(file.keys())
            if name.split(".")[0] in cases
        }
        metadata = {
            key: json.dumps([case for case in json.loads(value) if case["id"] in cases])
            for key, value in file.metadata().items()
        }
    missing = cases - {name.split(".")[0] for name in tensors}
    if missing:
        raise SystemExit(f"{path} has no case {', '.join(sorted(missing))}")
    return sorted_header(save(tensors, metadata), tensors)


def sorted_header(file: bytes, tensors: dict[str, Tensor]) -> bytes:
    """A safetensors file with the keys of its header in order: the library's own order is drawn
    anew each time.
    """
    (length,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + length])
    assert header.keys() - {"__metadata__"} == tensors.keys()
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + file[8 + length :]


def main(full: Path) -> None:
    for name, cases in CASES.items():
        file = HERE / f"{name}.safetensors"
        file.write_bytes(reduced(full / file.name, set(cases.split())))
        print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
