"""One HTML file about several runs: curves and gaps, plan, errors, studies, differences,
environment, cost.

sources    reads run directories, whole or damaged
facts      differences in data, configuration and machines; warnings; cost
page       renders page.html, a template: its words, tables and pictures
"""

from fp4train.lab.report.page import read_report
