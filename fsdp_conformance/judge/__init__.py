"""
The verdict on one case, derived from the reports of its ranks and the ends of their processes.

    verdicts    after a case ran: the record with its verdict
    findings    the findings of all ranks as one list
    drill       a case in which a rank was made to fail: is the failure reported as what it is?
    referee     the report of a rank with the judgement of the referee
    evidence    the parts of the reports that a record keeps, and whether its verdict follows from them

Everything here is pure: no torch, no clock, no file but the contract. `contract.gate` decides before a case whether it
runs, and `outcome.endings` how each rank ended. An *ending* is how one rank ended. A *consequence* is an ending that
another rank's ending explains ("connection closed by peer"); it is never the headline if there is a cause. A flag is
*undeclared* if the case asks for it (through `Case.needs`, the plan or the model) and the adapter does not declare it.

`contract/choices.md`, section "Verdicts", gives the order in which reasons are weighed, and why.
"""

from fsdp_conformance.judge.drill import drilled
from fsdp_conformance.judge.evidence import contradictions, is_excused, keep_evidence, shutdown_problems
from fsdp_conformance.judge.referee import has_ended_early, refereed_report, without_directory
from fsdp_conformance.judge.verdicts import ENDINGS, LOUD_REFUSAL, WRONGFUL_REFUSAL, Observed, judge

__all__ = [
    "ENDINGS",
    "LOUD_REFUSAL",
    "WRONGFUL_REFUSAL",
    "Observed",
    "contradictions",
    "drilled",
    "has_ended_early",
    "is_excused",
    "judge",
    "keep_evidence",
    "refereed_report",
    "shutdown_problems",
    "without_directory",
]
