"""
The reference sharding engine: one storage, one schedule, on torch alone.

    bucket_assignment   which parameters are reduced together
    reducer             averages gradients over ranks, bucket by bucket, while backward still runs
    data_parallel       `DataParallel(module)`: replicated training on the reducer

    fully_sharded       `FullyShardedDataParallel(module)`: sharded training on chunks; `fully_shard` without a wrapper
    flat_parameter      the parameters of one unit and dtype on a chunk, and what stands for them in modules
    unit_schedule       when each unit is gathered, resharded and reduced

    memory_pool         blocks that chunks are unsharded into, leased within a limit
    chunk               the flat storage of a unit: sharded, gathered, reduced (`chunk_*`, `gradient_buffer`: its parts)
    chunk_group         the chunks of a model, and their norm; `chunk_fetcher` brings them in, and chooses which leave
    chunk_search        the chunk size that wastes least
    reduce_scatter_bucketer   coalesces small reduce-scatters

    mesh_collectives    broadcast and scatter along one axis of a DeviceMesh, in place; `mesh_work`: what they return
    mesh_gathering      all-gather and reduce-scatter along one, of shards that may be uneven (`uneven_shards`)
    shard_dim_all_to_all      from sharded along one dim to sharded along another
    tensor_meta         whether the tensors of a group differ in more than values
    link_spec           what a link costs, as data; `link_fit` measures one, `device_spec` is what a device computes
    redistribution_cost what it takes to bring a tensor to another layout; `collective_cost` along one axis
    planner             prices every way to shard a model, and chooses (`plan_*`: its parts)
"""
