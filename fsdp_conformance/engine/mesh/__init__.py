"""
Collectives along one axis of a DeviceMesh.

    axis                  the group of this rank's row, from a mesh and an axis
    collectives           broadcast, scatter, all-gather, reduce-scatter, all-to-all between sharded dims
    uneven_shards         how a tensor is cut into shards
    tensor_meta           checks that all ranks pass tensors of the same shape and dtype
"""
