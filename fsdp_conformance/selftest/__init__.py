"""
Tests of the suite itself: known-wrong engines must be killed, and correct engines must not.

    cases       single cases in this process, against any implementation
    trials      what `fsdp-conformance selftest` tries, and what came of a trial
    correct     the correct engines
    plain       the comparison of losses that most projects rely on, for the difference
"""

from fsdp_conformance.selftest.cases import BoundCase, bound_case, bound_cases, run_case

__all__ = ["BoundCase", "bound_case", "bound_cases", "run_case"]
