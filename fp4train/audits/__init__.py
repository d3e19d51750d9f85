"""Audit of live steps: the tensors of one layer's call are quantised and multiplied again by the
readable reference, and compared with what ran.
"""
