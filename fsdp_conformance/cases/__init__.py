"""
Conformance cases: their declaration, the verbs of their bodies, and the controller that runs them.

    declaration    `conformance_case`: binds a test method to requirements and expands its axes
    base           `ConformanceTestCase`: the verbs of a body, and the parts that it has in a rank
    controller     gate, launch and verdict; no rank imports it
    stress         a case in a stress run
    own_model      the model that the user names with --workload, examined for the controller

The parts, which exist only in a rank:

    rank           the rank itself, which all parts share, and who is to blame for an exception
    training       the adapters of a case, and its trainings
    references     the references of a case, trained or taken from the store
    observed       a rank with a referee: the same trainings, with everything sent that the body gets to see
    referee        its counterpart, in a process that no engine code enters: the same body, on what was sent
    checks         comparisons, expectations and refusals
    control        values that are wrong on purpose, which a comparison must notice
    worlds         smaller worlds inside a case, and a directory that all of its ranks see
    places         the devices of this machine that cases can run on
    device         bytes and allocations on the rank's device
    bystanders     watching what an engine must leave alone
    default_methods  exceptions of the methods that an adapter inherits from this suite
    refusal        how a deliberate refusal differs from a breakdown
"""
