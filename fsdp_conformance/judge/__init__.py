"""
The verdict on one case: what its ranks reported and how their processes ended, turned into one record.

`gate` decides before anything is started (DISABLED, UNSUPPORTED, NOT_RUN_ENV), `judge` afterwards. Both are pure: no
torch, no clock, no file but the contract. Three words are used throughout. An *ending* is what stopped one rank
before its body was through. A *consequence* is an ending that another rank's ending explains ("connection closed by
peer"); it never makes the headline while a cause is there. A flag is *undeclared* if the case asks for it (through
`Case.needs`, the plan or the model) and the adapter does not declare it.

The order in which reasons are weighed, and why each stands where it does, is in `contract/choices.md`, section
"Verdicts".
"""

from fsdp_conformance.judge.gate import Gated, Place, device_for, gate
from fsdp_conformance.judge.verdicts import LOUD_REFUSAL, judge

__all__ = ["LOUD_REFUSAL", "Gated", "Place", "device_for", "gate", "judge"]
