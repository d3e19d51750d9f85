"""Studies of a run: measurements on its checkpoints that separate recipes, layers and operands,
with error bars.

subject      the checkpoint that is studied, opened as a run that trains nothing
record       finished measurements in a file, so that a killed study goes on, and how far it is
intervals    means, intervals, paired differences, corrections for several comparisons
sensitivity  what a recipe harms: parts, gradients, findings, tradeoff
summary      the table and the policy file of a sensitivity
rank         which recipe is better: candidates, forks, sequential
ranking      the result of a ranking, and its table
results      rank.json and sensitivity.json, written and read
figures      pictures of both
"""
