"""Audit of live steps: the tensors of one layer's call are quantised and multiplied again by the
readable reference, and compared with what ran.
"""

from fp4train.audit.fault import Audited as Audited
from fp4train.audit.loop import AuditReport as AuditReport, audit as audit
from fp4train.audit.observe import Observer as Observer
