"""Is a recipe good enough? A sequential test of equivalence on paired forks.

betting     the test: evidence, interval, verdict, and how many forks it will need
question    what a gate is asked, and what the records hold of it
gate        forks are made until the verdict falls
result      the answer as text and as gate.json
"""

from fp4train.lab.gate.betting import (
    BOUND,
    STAKES,
    WEIGHTS,
    decide,
    decisions,
    evidence_below,
    interval,
    rounds_needed,
)
from fp4train.lab.gate.gate import gate
from fp4train.lab.gate.question import GateRequest
from fp4train.lab.gate.result import (
    EXIT_CODES,
    Estimated,
)
