"""
The contract: what an implementation of sharded data-parallel training owes its users, as data.

`requirements.toml` is the specification, `choices.md` says why it reads as it does, `profiles/` holds the frozen
manifests that a certificate is computed from. Ids are stable: a requirement is added at the end, never renumbered,
never used again.
"""

from fsdp_conformance.contract.requirement import (
    CHAPTERS,
    OBSERVATIONS,
    Contract,
    Level,
    Requirement,
    load,
    parse,
)

__all__ = ["CHAPTERS", "OBSERVATIONS", "Contract", "Level", "Requirement", "load", "parse"]
