"""Analysis of run directories, and what all figures share.

history    metrics as series over steps, recipes and events; which runs compare
figure     colours, style, limits; a figure as PNG and as inline SVG
curves     figures over steps: one run, several runs
heatmap    quantisation errors by layer and step
compare    several runs side by side
"""

from fp4train.lab.analysis.compare import Comparison as Comparison
from fp4train.lab.analysis.curves import draw_curves as draw_curves
from fp4train.lab.analysis.figure import NARROW as NARROW
from fp4train.lab.analysis.figure import PICTURE as PICTURE
from fp4train.lab.analysis.figure import WIDE as WIDE
from fp4train.lab.analysis.figure import Draw as Draw
from fp4train.lab.analysis.figure import save as save
from fp4train.lab.analysis.figure import shades as shades
from fp4train.lab.analysis.heatmap import Errors as Errors
from fp4train.lab.analysis.heatmap import draw_statistics as draw_statistics
from fp4train.lab.analysis.history import History as History
from fp4train.lab.analysis.history import Series as Series
from fp4train.lab.analysis.history import read_history as read_history
from fp4train.lab.analysis.history import training_loss as training_loss
