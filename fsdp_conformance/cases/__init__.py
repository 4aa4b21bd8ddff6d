"""
Conformance cases: how one is declared, what its body may call, and how the controller runs it.

    declaration    `conformance_case`: binds a test method to requirements and expands its axes
    base           `ConformanceTestCase`: gate, launch and judge in the controller; the body runs in every rank
    checks         the checks that a body calls
    references     the references of a case, trained or taken from the store
    worlds         smaller worlds inside a case, and a directory that all of its ranks see
    places         the devices of this machine that cases can run on
    refusal        what counts as a refusal, and what is a breakdown
"""
