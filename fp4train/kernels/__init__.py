"""Fused kernels, one idea a file: `cpu` over the C extension in `csrc`, and Triton ones. They know tensors and formats
only; `quantize` chooses among them, and each equals its readable reference to the bit."""
