"""
Oracles: they read histories and report what does not hold. None of them calls the code that it judges.

Checks, each of which returns a CheckResult:

    parity              values of every step against the references (R001-R003, R010, R101, R105, R130,
                        R157)
    resharding          whether units are resharded between steps, by what is gathered again (R111, R115, R118)
    equality            digests of what must be identical on every rank (R007, R067)
    partition           the sharding witness: sharded or replicated, by bytes and traffic (R188, R033)
    communication       number and bytes of collectives (R009, R062-R066, R068, R072, R083)
    groups              the process groups of collectives, and each unit's traffic under hybrid sharding (R069, R151)
    norms               the total norm of the gradients, and what it costs (R101-R103)
    order               the order of collectives, and whether every step issues the same ones (R070, R071)
    invariance          two runs of one implementation that must be equal (R005, R008, R078, R092, R093, R126, R151)
    optimizer_state     the optimizer's state, and how often it stepped (R140, R142)
    recorded_values     tensors that two recordings of a script have kept: the first wrong element
    whole_matrix        Muon's updates, which only a whole matrix gives (R140)
    memory              bytes allocated on an accelerator: shards, peaks, growth (R033-R035, R038-R040)
    checkpoint          state dicts and what was loaded: names, values, storage, hooks (R109, R139, R144-R150)
    streams             races between streams (R074, R075, R138)
    overlap             communication beside computation (R080)
    bystanders          what an engine must not change: random numbers, settings, the user's parameters (R189)
    growth              what steps leave behind: tensors, hooks, process groups, threads (R039, R189)
    traffic_bound       an upper bound of a step's traffic that holds for any schedule (R068)

What they share:

    result              CheckResult and Tally: findings and counts
    derived             gradients from the changes of parameters, where an implementation does not expose them
    rounding            values against the rounding reference, bit for bit
    comparison          one tensor against another
    traffic             the collectives of a history by step, phase and kind
"""
