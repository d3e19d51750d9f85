"""Is a recipe good enough? A sequential test of equivalence on paired forks, and what whole runs of
few seeds can say.

betting     the test: evidence, interval, verdict, and how many forks it will need
question    what a gate is asked, and what the records hold of it
gate        forks are made until the verdict falls
result      the answer as text and as gate.json
whole_runs  the gap of runs that exist already, beside a margin
"""
