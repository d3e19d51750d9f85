"""One HTML file about several runs: curves and gaps, plan, errors, studies, differences,
environment, cost.

sources    reads run directories, whole or damaged
groups     losses and gaps of groups of seeds, with intervals
facts      differences in data, configuration and machines; warnings; cost
page       renders page.html, a template: its words, tables and figures
"""

from fp4train.lab.report.facts import different_data as different_data
from fp4train.lab.report.groups import curve as curve, gap_at as gap_at, gap_curve as gap_curve
from fp4train.lab.report.page import read_report as read_report, write_report as write_report
from fp4train.lab.report.sources import read_sources as read_sources
