"""The laboratory: what measures, compares and explains runs and machines. Only the command line
imports it.
"""
