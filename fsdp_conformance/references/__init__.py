"""
References: independent trainings of a workload, and the bounds within which an implementation must agree with them.

    reference_set     train_references: the references of a workload and regime, their agreement and bounds
    single_process    all ranks in one process, without collectives, in float64 or float32: the expected values
    all_reduce        the full model on every rank and an explicit all-reduce
    ddp               torch's DistributedDataParallel
    rounding          mixed precision: rounds where the plan says
    plain_training    state dicts of the unwrapped model and optimizer, also with ranks that change between steps
    loop              the training loop of the references
    structures        tensors inside nested values
    sharing           which references a case may take from the store, and which rank may write one
    store             the store: a directory of references, shared by cases, engines and runs
    scenario          what references depend on, as text: the keys of the store
    packed_history    a history as its structure and one flat tensor, to be sent to another rank
    exactness         proof that a probe is exact, and which regimes demand bitwise equality
    self_check        checks of a workload: data that differ between ranks, pure functions, names that exist
    fitness           if a user's workload can judge an engine, and what cases can ask of it
    segments          many small tensors as one vector
    tolerance         bounds for everything else, with their derivations
"""
