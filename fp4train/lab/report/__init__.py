"""One HTML file about several runs: curves and gaps, plan, errors, studies, differences, environment, cost.

sources    reads run directories, whole or damaged
groups     losses and gaps of groups of seeds, with intervals
html       elements from text that is data, escaped; figures of `lab.analysis` and `lab.studies` as inline SVG
sections   the parts of the page: results, curves, studies, errors;  facts  those on configuration, machines and cost
page       the document; page.css  its style
"""
