"""Studies of a run: measurements on its checkpoints that separate recipes, layers and operands, with error bars.

subject      the checkpoint that is studied, opened as a run that trains nothing
record       finished measurements in a file, so that a killed study goes on
statistics   means, intervals, paired differences, corrections for several comparisons
"""
