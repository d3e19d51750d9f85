"""Audit of live steps: the tensors of one layer's call are quantised and multiplied again by the
readable reference, and compared with what ran.
"""

from fp4train.audit.bits import bit_sum as bit_sum
from fp4train.audit.call import ObservedCall as ObservedCall, Product as Product
from fp4train.audit.compare import compare as compare
from fp4train.audit.expected import AuditedCall as AuditedCall
from fp4train.audit.fault import Audited as Audited
from fp4train.audit.foreign import ForeignObserver as ForeignObserver
from fp4train.audit.loop import AuditReport as AuditReport, audit as audit
from fp4train.audit.observe import Observer as Observer, partly_uncovered as partly_uncovered
from fp4train.audit.settings import AuditSettings as AuditSettings, in_turn as in_turn
from fp4train.audit.start import check_plan as check_plan
