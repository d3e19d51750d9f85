"""A run: how it is built, resumed, watched and ended."""
