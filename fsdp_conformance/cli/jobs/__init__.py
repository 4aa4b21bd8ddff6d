"""
The jobs of child processes, a module each: `run` takes a function that sends answers, and the arguments of the request.

    survey      what the implementation declares, and what the machine has
    workload    the problems of the user's own model, and what it has
    smoke       the adapter check before a run
    cases       the cases of a run: the process becomes pytest
    doctor      trial launches and collectives
    plan        the price of each way to shard a model
    values      the first wrong element of tensors that two runs have kept
    explore     drawn examples, and failures shrunk and confirmed
    selftest    known-wrong and correct engines, each tried on its cases
    build       the simulated accelerator, compiled
"""
