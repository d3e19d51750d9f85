"""Triton kernels, SM 8.0 and newer (Triton 3.6+), each equal to the torch reference to the bit.

rounding.py   casts, maxima that keep NaN, rounding to an element grid, random bits (device functions)
scale.py      global and block scales: bytes with a mantissa, E8M0, float32, macro-blocks  (device functions)
levels.py     HiF4's exponents, and the grids that IF4's blocks choose              (device functions)
extents.py    largest magnitudes of what shares a scale above block scales
quantize.py   the kernel that quantises; blocks along contiguous columns: 1xN, NVFP4's packed codes, NxN, one scale per
              tensor or row; decoding; largest magnitude of a tensor or of its rows
both.py       codes of both forms of a tensor from one read of it
adamw.py      one step of AdamW with moments in BF16
columns.py    1xN blocks along a strided axis (a transposed view), with the Hadamard transform and its amax

Exactness. Kernels are launched with enable_fp_fusion=False: a multiplication and an addition
contracted into an fma would round once instead of twice; every fma here is written out. Divisions
are tl.div_rn (IEEE). Float32 subnormals are kept: Triton's NVIDIA backend emits no .ftz for add,
mul, fma, min, max and div.rn (a test compiles all kernels for SM 8.0, 9.0 or 10.0 and looks).

FP8 casts to nearest are the hardware's from SM 8.9 on (`rounding.casts`). SM 8.0 has none, and the
interpreter's is wrong: there, and in FP4, they are arithmetic on float32 bits. Tests show that PTX's
definition of the cast, and kernels with it, have the bits of the reference.

What a kernel is compiled for is one compile-time argument V (`quantize.triton_variant.Variant`).

Importing this package imports nothing; importing one of its modules imports Triton.
"""
