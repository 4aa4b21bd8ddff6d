"""
Disturbances that change when things happen, but never a result of a correct implementation.

    fault        what every fault offers: install, remove, and whether it struck
    recorded     faults that need recorded process groups: they have new groups recorded, or raise
    points       points of a training loop that does not announce them
    delay        ranks that are late for a collective, at a point of the loop, or when parameters are freed
    late         asynchronous collectives that complete late and out of order
    pending      one such collective, between its issue and its completion
    poison       outputs, freed memory and new memory that hold poison
    failure      a rank that fails: the one fault that a correct implementation cannot train through
    slow_rank    a rank that sleeps now and then
    provocation  the faults of a stress run on one rank, drawn from its seed
    pause        lets time pass on the host or on a device's stream
"""
