"""
The reference sharding engine, built on torch alone: one storage, one schedule, five systems.

    fully_sharded        `FullyShardedDataParallel` and `fully_shard`: units, their schedule, checkpoints
    chunks               the flat, sharded storage of a unit, and the memory pool that chunks are gathered into
    data_parallel        `DataParallel`: replicated training on the reducer
    bucketing            small collectives coalesced into few large ones
    mesh                 collectives along one axis of a DeviceMesh

    errors               what the engine raises
    sharding_strategy    full shard, gradient shard, hybrid, none
    flat_collectives     all-gather, reduce-scatter and all-reduce of flat buffers, and the group they run on
    streams              side streams, where the device has them
    structures           the tensors inside nested inputs and outputs
    verification         whether all ranks built the same model

A package uses those below it in this order: fully_sharded, data_parallel, chunks, bucketing, mesh, the shared modules.
"""
