"""Studies of a run: measurements on its checkpoints that separate recipes, layers and operands,
with error bars.

subject      the checkpoint that is studied, opened as a run that trains nothing
record       finished measurements in a file, so that a killed study goes on, and how far it is
sensitivity  what a recipe harms: parts, gradients, findings, tradeoff
summary      the table and the policy file of a sensitivity
rank         which recipe is better: candidates, forks, sequential
ranking      the result of a ranking, and its table
results      what studies write and read: rank.json, sensitivity.json, gate.json
figures      pictures of both
"""

from fp4train.lab.studies.base import (
    Base,
    Branch,
    ForkRequest,
    ForkSettings,
    RankRequest,
)
from fp4train.lab.studies.bases import open_bases
from fp4train.lab.studies.candidates import (
    Axis,
    RecipeCandidate,
    candidates,
    sweep_axes,
)
from fp4train.lab.studies.findings import (
    Finding,
    Judgement,
    Sensitivity,
    judgement,
)
from fp4train.lab.studies.forks import Fork, open_checkpoint
from fp4train.lab.studies.gradients import GradientMeter
from fp4train.lab.studies.parts import RecipePart, RecipeParts
from fp4train.lab.studies.rank import rank
from fp4train.lab.studies.ranking import Entry, Ranking
from fp4train.lab.studies.record import (
    MEASUREMENTS,
    Shown,
    StudyRecord,
    open_record,
    study_progress,
)
from fp4train.lab.studies.recorded_forks import Forks
from fp4train.lab.studies.results import (
    GATE,
    RANKING,
    SENSITIVITY,
    GateResult,
    RankResult,
    SensitivityResult,
    read_studies,
)
from fp4train.lab.studies.sensitivity import Study
from fp4train.lab.studies.sequential import (
    ALPHA,
    VERDICTS,
    Looks,
    Pair,
)
from fp4train.lab.studies.subject import Subject, open_subject
from fp4train.lab.studies.tradeoff import (
    trade_off,
)
