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
    Base as Base,
    Branch as Branch,
    ForkRequest as ForkRequest,
    ForkSettings as ForkSettings,
    RankRequest as RankRequest,
)
from fp4train.lab.studies.bases import open_bases as open_bases
from fp4train.lab.studies.candidates import (
    Axis as Axis,
    RecipeCandidate as RecipeCandidate,
    candidates as candidates,
    sweep_axes as sweep_axes,
)
from fp4train.lab.studies.findings import (
    Finding as Finding,
    Judgement as Judgement,
    Sensitivity as Sensitivity,
    judgement as judgement,
)
from fp4train.lab.studies.forks import Fork as Fork, open_checkpoint as open_checkpoint
from fp4train.lab.studies.gradients import GradientMeter as GradientMeter
from fp4train.lab.studies.parts import RecipePart as RecipePart, RecipeParts as RecipeParts
from fp4train.lab.studies.rank import rank as rank
from fp4train.lab.studies.ranking import Entry as Entry, Ranking as Ranking
from fp4train.lab.studies.record import (
    MEASUREMENTS as MEASUREMENTS,
    Shown as Shown,
    StudyRecord as StudyRecord,
    open_record as open_record,
    study_progress as study_progress,
)
from fp4train.lab.studies.recorded_forks import Forks as Forks
from fp4train.lab.studies.results import (
    GATE as GATE,
    RANKING as RANKING,
    SENSITIVITY as SENSITIVITY,
    GateResult as GateResult,
    RankResult as RankResult,
    SensitivityResult as SensitivityResult,
    read_studies as read_studies,
)
from fp4train.lab.studies.sensitivity import Study as Study
from fp4train.lab.studies.sequential import (
    ALPHA as ALPHA,
    VERDICTS as VERDICTS,
    Looks as Looks,
    Pair as Pair,
)
from fp4train.lab.studies.subject import Subject as Subject, open_subject as open_subject
from fp4train.lab.studies.tradeoff import (
    trade_off as trade_off,
)
