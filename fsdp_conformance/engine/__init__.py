"""
The reference sharding engine, built on torch alone: one storage, one schedule, five systems.

    fully_sharded        `FullyShardedDataParallel` and `fully_shard`: units, their schedule, checkpoints
    chunks               the flat, sharded storage of a unit, and the memory pool that chunks are gathered into
    data_parallel        `DataParallel`: replicated training on the reducer
    bucketing            small collectives coalesced into few large ones
    mesh                 collectives along one axis of a DeviceMesh

    accelerator          the accelerator of this machine
    errors               the errors that the engine raises
    sharding_strategy    full shard, gradient shard, hybrid, none
    communication        collectives of flat tensors, the group they run on, and the order between streams
    structures           the tensors inside nested inputs and outputs
    verification         whether all ranks agree, for example on the parameters of their model

A package only uses those after it in this list: fully_sharded, data_parallel, chunks, bucketing, mesh, shared modules.
"""
