"""
Collectives along one axis of a DeviceMesh.

    axis                  the group of this rank's row, from a mesh and an axis
    collectives           broadcast and scatter, in place
    gathering             all-gather and reduce-scatter of shards that may be uneven
    shard_dim_all_to_all  from sharded along one dim to sharded along another
    uneven_shards         how a tensor is cut into shards
    tensor_meta           whether all ranks pass tensors of the same shape and dtype
    agreement             whether all ranks say the same, by digest
    work                  a collective in flight and its result
"""
