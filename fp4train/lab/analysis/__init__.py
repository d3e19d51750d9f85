"""Analysis of run directories, and what all pictures share.

history    metrics as series over steps, recipes and events
groups     figures of runs; means, gaps and intervals of those that differ in their seed only
figure     colours, style, limits; a picture as panels, and as a file
curves     pictures over steps: one run, several runs
heatmap    quantisation errors by layer and step
compare    several runs side by side
"""

from fp4train.lab.analysis.compare import (
    OUTPUTS,
    Comparison,
    compare,
)
from fp4train.lab.analysis.figure import (
    FIGURES,
    PICTURE,
    Draw,
    Width,
    check_out,
    new_figure,
    save,
)
from fp4train.lab.analysis.groups import (
    figures_of_groups,
    seed_groups,
    summarise,
)
from fp4train.lab.analysis.heatmap import Errors
from fp4train.lab.analysis.history import (
    ROUTINE,
    History,
    read_history,
    training_loss,
)
