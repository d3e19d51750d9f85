"""Quantisation errors: metrics of a tensor, and a probe that measures them in a running model."""
