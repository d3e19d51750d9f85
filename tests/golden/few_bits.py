"""Makes few_bits.json and midpoint.json: stochastic rounding with few random bits by gfloat 0.5.2
(MIT licence).

    python tests/golden/few_bits.py

few_bits: mode StochasticFastest, SRFF of "On Stochastic Rounding with Few Random Bits" (arXiv
2504.20634). midpoint: mode StochasticFast, that of the package of arXiv 2609.02846
(github.com/MrHuff/ue5m3-fp4, formats.py at 59868e7).

Values of normal and small magnitude, and those on and beside the grid, with drawn bits.
"""

import json
from pathlib import Path

import numpy as np
from gfloat import RoundMode, round_ndarray
from gfloat.formats import (
    format_info_ocp_e2m1,
    format_info_ocp_e3m2,
    format_info_ocp_e5m2,
)

FORMATS = {
    "e2m1": format_info_ocp_e2m1,
    "e3m2": format_info_ocp_e3m2,
    "e5m2": format_info_ocp_e5m2,
}
COUNT = 48


def case(
    element: str,
    bits: int,
    generator: np.random.Generator,
    mode: RoundMode = RoundMode.StochasticFastest,
) -> dict[str, object]:
    """Values, random bits and rounded values of one format, float32 as hexadecimal digits."""
    info = FORMATS[element]
    values = generator.normal(size=COUNT).astype(np.float32)
    values[COUNT // 2 :] *= np.float32(info.max / 4)
    eighths = np.arange(-12, 12, dtype=np.float32) / 8
    values[:12] = eighths[:12]
    values[12:24] = np.nextafter(eighths[:12], np.float32(0))
    drawn = generator.integers(0, 1 << bits, size=COUNT)
    rounded = round_ndarray(
        info,
        values.astype(np.float64),
        rnd=mode,
        sat=True,
        srbits=drawn,
        srnumbits=bits,
    )
    return {
        "element": element,
        "bits": bits,
        "values": values.tobytes().hex(),
        "drawn": drawn.tolist(),
        "rounded": rounded.astype(np.float32).tobytes().hex(),
    }


def main() -> None:
    generator = np.random.default_rng(0)
    cases = [case(element, bits, generator) for element in FORMATS for bits in (2, 3, 8, 15)]
    write("few_bits.json", cases)
    middles = [case(element, 8, generator, RoundMode.StochasticFast) for element in FORMATS]
    write("midpoint.json", middles)


def write(name: str, cases: list[dict[str, object]]) -> None:
    Path(__file__).with_name(name).write_text(json.dumps({"cases": cases}) + "\n")


if __name__ == "__main__":
    main()
