"""NVFP4 with double-block scales, written in numpy from the definition of TetraJet-v2 (arXiv
2510.27527) alone.
"""

import ml_dtypes
import numpy as np

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def double_block(x: np.ndarray, *, dividing: bool = False) -> np.ndarray:
    """x [R, C], C a multiple of 16, quantised and decoded, written from the paper's definition
    alone.

    dividing: in the order of the authors' kernels, amax/448/6 and amax_b/S/6, instead of ours.
    """
    f = np.float32
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 128):
            outer = x[row, start : start + 128]
            amax = np.abs(outer).max()
            if amax == 0:
                continue
            decode = amax / f(448) / f(6) if dividing else f(1) / (f(448 * 6) / amax)
            for i in range(0, len(outer), 16):
                block = outer[i : i + 16]
                largest = np.abs(block).max()
                scale = (
                    largest / decode / f(6)
                    if dividing
                    else largest * (f(448 * 6) / amax * (f(1) / f(6)))
                )
                scale = min(scale, f(448)).astype(ml_dtypes.float8_e4m3fn).astype(f)
                if scale == 0:
                    continue
                t = block / (scale * decode) if dividing else block * (f(1) / (scale * decode))
                # nearest, ties to the even code: between neighbours k and k + 1 the even one has
                # even k
                magnitude = np.minimum(np.abs(t), f(6))
                k = np.clip(np.searchsorted(GRID, magnitude, side="right") - 1, 0, 6)
                middle = (GRID[k] + GRID[k + 1]) / 2
                up = (magnitude > middle) | ((magnitude == middle) & (k % 2 == 1))
                out[row, start + i : start + i + 16] = np.copysign(
                    GRID[k + up] * (scale * decode), t
                )
    return out
