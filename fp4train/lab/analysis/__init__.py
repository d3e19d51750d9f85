"""Analysis of run directories, and what all figures share.

history    metrics as series over steps, recipes and events; which runs compare
figure     colours, style, limits; a figure as PNG and as inline SVG
curves     figures over steps: one run, several runs
heatmap    quantisation errors by layer and step
compare    several runs side by side
"""

from fp4train.lab.analysis.compare import Comparison as Comparison
from fp4train.lab.analysis.curves import draw_curves as draw_curves
from fp4train.lab.analysis.figure import (
    NARROW as NARROW,
    PICTURE as PICTURE,
    WIDE as WIDE,
    Draw as Draw,
    save as save,
    shades as shades,
)
from fp4train.lab.analysis.heatmap import Errors as Errors, draw_statistics as draw_statistics
from fp4train.lab.analysis.history import (
    History as History,
    Series as Series,
    read_history as read_history,
    training_loss as training_loss,
)
