"""Analysis of run directories, and what all pictures share.

history    metrics as series over steps, recipes and events
groups     figures of runs; means, gaps and intervals of those that differ in their seed only
figure     colours, style, limits; a picture as panels, and as a file
curves     pictures over steps: one run, several runs
heatmap    quantisation errors by layer and step
compare    several runs side by side
"""

from fp4train.lab.analysis.compare import (
    OUTPUTS as OUTPUTS,
    Comparison as Comparison,
    compare as compare,
)
from fp4train.lab.analysis.figure import (
    FIGURES as FIGURES,
    PICTURE as PICTURE,
    Draw as Draw,
    Width as Width,
    check_out as check_out,
    new_figure as new_figure,
    save as save,
)
from fp4train.lab.analysis.groups import (
    figures_of_groups as figures_of_groups,
    seed_groups as seed_groups,
    summarise as summarise,
)
from fp4train.lab.analysis.heatmap import Errors as Errors
from fp4train.lab.analysis.history import (
    ROUTINE as ROUTINE,
    History as History,
    read_history as read_history,
    training_loss as training_loss,
)
