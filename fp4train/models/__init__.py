"""Model architectures: one folder per family; `common` holds the parts that families share.

A model is a frozen config dataclass with `build(vocab_size, seq_len) -> nn.Module`, see `architecture`.
"""
