"""
The verdict on one case, derived from the reports of its ranks and the ends of their processes.

    gate        before anything starts: the device of a case, or why it does not run
    verdicts    after it ran: the record with its verdict
    endings     how each rank ended, and which failed first
    findings    the findings of all ranks as one list
    telling     which of them says most
    mismatch    ranks that called different collectives
    drill       a case in which a rank was made to fail: whether that is seen for what it is
    evidence    what a record keeps of the reports, and whether its verdict follows from that

`gate` and `judge` are pure: no torch, no clock, no file but the contract. An *ending* is how one rank ended. A
*consequence* is an ending that another rank's ending explains ("connection closed by peer"); it is never the headline
if there is a cause. A flag is *undeclared* if the case asks for it (through `Case.needs`, the plan or the model) and
the adapter does not declare it.

`contract/choices.md`, section "Verdicts", gives the order in which reasons are weighed, and why.
"""

from fsdp_conformance.judge.drill import SWALLOWED, drilled
from fsdp_conformance.judge.evidence import contradictions, keep_evidence
from fsdp_conformance.judge.gate import Gated, Place, declined_flags, device_for, gate
from fsdp_conformance.judge.verdicts import ENDINGS, LOUD_REFUSAL, WRONGFUL_REFUSAL, judge

__all__ = [
    "ENDINGS",
    "LOUD_REFUSAL",
    "SWALLOWED",
    "WRONGFUL_REFUSAL",
    "Gated",
    "Place",
    "contradictions",
    "declined_flags",
    "device_for",
    "drilled",
    "gate",
    "judge",
    "keep_evidence",
]
