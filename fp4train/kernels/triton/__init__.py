"""Triton kernels, SM 8.0 and newer (Triton 3.6+): one kernel a file, each equal to the torch reference to the bit.

element.py    rounding to an element grid, to nearest and stochastically; codes      (device functions)
scale.py      global and block scales: E4M3, E8M0, float32, powers of two            (device functions)
philox.py     Philox4x32-10                                                          (device functions)
hadamard.py   butterfly over neighbours held in registers                            (device functions)
bits.py       exact casts, maxima that keep NaN                                      (device functions)
amax.py       largest magnitude of a tensor or of its rows, after a Hadamard transform if asked
rows.py       1xN blocks along contiguous columns: codes and values
rows16.py     the same for NVFP4's packed codes, a block a thread
columns.py    1xN blocks along a strided axis (a transposed view), with the Hadamard transform
squares.py    NxN blocks
whole.py      one scale a tensor or a row
decode.py     codes and scales back to values

Exactness. Kernels are launched with enable_fp_fusion=False: a multiplication and an addition contracted into an fma
would round once instead of twice; every fma here is written out. Divisions are tl.div_rn (IEEE). Float32 subnormals
are kept: Triton's NVIDIA backend emits no .ftz for add, mul, fma, min, max and div.rn (a test compiles all kernels
for SM 8.0, 9.0 and 10.0 and looks). FP8 and FP4 casts are arithmetic on float32 bits: SM 8.0 has no FP8 cast, and
the interpreter's is wrong.

Importing this package imports nothing; importing one of its modules imports Triton.
"""
