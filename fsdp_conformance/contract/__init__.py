"""
The contract: what an implementation of sharded data-parallel training owes its users, as data.

    requirement    a requirement, and the contract that holds all of them
    lint           checks of the contract's data
    scopes         the base and the extensions of a certificate
    profile        the frozen lists of cases from which certificates are computed
    minimum        the checks that a passing case has made, whatever the engine
    case           a case as data: its id, its requirements, and its needs
    gate           before anything starts: the device of a case, or why it does not run
    fingerprint    the hash of the suite
    selection      which cases of a profile a run selects
    elsewhere      where a case is that the profile does not have

`requirements.toml` is the specification, `choices.md` gives the reasons for it, `uncovered.toml` lists requirements
without a case or an adapter, and `profiles/` holds the profiles. Ids are stable: requirements are added at the end, and
ids are never renumbered or reused.
"""

from fsdp_conformance.contract.requirement import (
    CHAPTERS,
    OBSERVATIONS,
    Contract,
    Level,
    Requirement,
    load,
    parse,
    uncovered,
    undeclared,
)

__all__ = ["CHAPTERS", "OBSERVATIONS", "Contract", "Level", "Requirement", "load", "parse", "uncovered", "undeclared"]
