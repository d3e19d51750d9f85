"""One HTML file about several runs: curves and gaps, plan, errors, studies, differences,
environment, cost.

sources    reads run directories, whole or damaged
groups     losses and gaps of groups of seeds, with intervals;  facts  of their configuration, machines and cost
page       renders page.html, a template: its words, tables and figures; page.css  its style
"""
