"""
The loop that trains an implementation through its adapter, and what it observes on the way.

    session           trains a workload through an adapter and records its history
    pipeline          a rank's place in a pipeline of stages
    pipeline_stage    a stage in torch's pipeline schedules
    overlap           what each collective and each computation waits for, on the simulated accelerator
    watch             allocator statistics and the simulated accelerator's checker
    smoke             tries an adapter out on two ranks
"""
