"""Fused kernels: `cpu`, over the C extension in `csrc`, and `triton`. They depend on tensors and
formats only. `quantize` chooses among them; each matches the readable reference in every bit.
"""
