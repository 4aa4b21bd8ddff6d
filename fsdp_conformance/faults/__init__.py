"""
Disturbances that change when things happen, but never a result of a correct implementation.

    fault    what every fault offers: install, remove, and whether it struck
    delay    ranks that are late for a collective, at a point of the loop, or when parameters are freed
    pause    lets time pass on the host or on a device's stream
"""
