"""What a step is measured by: statistics of quantised operands, and profiles."""

from fp4train.measure.statistics import Measured, watch
