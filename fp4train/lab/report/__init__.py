"""One HTML file about several runs: curves and gaps, plan, errors, studies, differences,
environment, cost.

sources    reads run directories, whole or damaged
groups     losses and gaps of groups of seeds, with intervals
facts      differences in data, configuration and machines; warnings; cost
page       renders page.html, a template: its words, tables and figures
"""
