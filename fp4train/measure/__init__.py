"""Quantisation errors: metrics of a tensor, and statistics of a running model; how tensor cores sum
products.
"""

from fp4train.measure.metrics import error_metrics as error_metrics, measure as measure
from fp4train.measure.statistics import Measured as Measured, watch as watch
