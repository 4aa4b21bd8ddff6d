"""
The loop that trains an implementation through its adapter and observes it.

    session           trains a workload through an adapter and returns its history
    task              a training as data: adapter, workload, world, conditions; and the observer that it calls
    loop              one step after the other
    events            user code between the passes of a step
    recorder          labels, times, bytes, and the values of each step
    batches           the inputs, placed on the device in advance
    optimizer         the optimizer that the regime names
    pipeline          a rank's place in a pipeline of stages
    pipeline_stage    a stage in torch's pipeline schedules
    further_step      parts of a step that need no recorder, and a step after the training
    overlap           the waits of each collective and each computation, on the simulated accelerator
    watch             allocator statistics and the simulated accelerator's checker
    smoke             tries an adapter out on two ranks
"""
