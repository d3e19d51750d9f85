"""Quantisation errors: metrics of a tensor, and statistics of a running model; how tensor cores sum
products.
"""
