"""Architectures, one a file. A model is a frozen config dataclass with `build(vocab_size, seq_len) -> nn.Module`."""
