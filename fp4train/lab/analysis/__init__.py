"""Analysis of run directories, and what all figures share.

history    metrics as series over steps, recipes and events; which runs compare
figure     colours, style, limits; a figure as PNG and as inline SVG
curves     figures over steps: one run, several runs
heatmap    quantisation errors by layer and step
compare    several runs side by side
"""

from fp4train.lab.analysis.compare import (
    OUTPUTS as OUTPUTS,
    Comparison as Comparison,
    compare as compare,
)
from fp4train.lab.analysis.counts import (
    RunSummary as RunSummary,
    means_over_seeds as means_over_seeds,
    summarise as summarise,
)
from fp4train.lab.analysis.curves import (
    draw_curves as draw_curves,
    one_run as one_run,
    smoothing as smoothing,
)
from fp4train.lab.analysis.figure import (
    COLOURS as COLOURS,
    FIGURES as FIGURES,
    IN_RECIPE as IN_RECIPE,
    INK as INK,
    NARROW as NARROW,
    PICTURE as PICTURE,
    QUIET as QUIET,
    TRAIN as TRAIN,
    VALIDATION as VALIDATION,
    VARIABLES as VARIABLES,
    WIDE as WIDE,
    Draw as Draw,
    Width as Width,
    check_out as check_out,
    colour_of as colour_of,
    endings_of as endings_of,
    gap_limits as gap_limits,
    inches_of as inches_of,
    inline_svg as inline_svg,
    line_of as line_of,
    lines_within as lines_within,
    loss_axis as loss_axis,
    loss_limits as loss_limits,
    new_figure as new_figure,
    save as save,
    shades as shades,
    style as style,
)
from fp4train.lab.analysis.heatmap import (
    LEAST_DB as LEAST_DB,
    Errors as Errors,
    decibels as decibels,
    draw_maps as draw_maps,
    draw_statistics as draw_statistics,
    statistics_maps as statistics_maps,
    worst_maps as worst_maps,
    worst_operand as worst_operand,
)
from fp4train.lab.analysis.history import (
    ROUTINE as ROUTINE,
    Band as Band,
    History as History,
    Series as Series,
    common_step as common_step,
    common_window as common_window,
    read_history as read_history,
    seed_groups as seed_groups,
    training_loss as training_loss,
)
from fp4train.lab.analysis.over_steps import RecipeRow as RecipeRow, over_steps as over_steps
