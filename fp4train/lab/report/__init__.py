"""One HTML file about several runs: curves and gaps, plan, errors, studies, differences, environment, cost.

sources    reads run directories, whole or damaged
studies    reads what sensitivity and rank wrote
errors     the quantisation errors of a run as layer × operand × step
gaps       losses and gaps of groups of seeds, with intervals
figures    the figures of runs;  study_figures  those of studies
svg        a figure as inline SVG, for a wide page and for a narrow one
html       elements from text that is data, escaped
sections   the parts of the page;  study_sections  those of studies
page       the document and its style
"""
