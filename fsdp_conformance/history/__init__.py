"""
Observations in a rank, as data.

    training      a whole training run: losses, gradients, parameters, buffers, memory, collectives
    collective    one collective call
    memory        bytes allocated on the accelerator at a point of the training loop
    overlap       what operations of a device wait for
    transfer      values as bytes and back
    typed         whether a value has the types that its class declares
    hazard        two accesses to the same memory that nothing orders
"""
