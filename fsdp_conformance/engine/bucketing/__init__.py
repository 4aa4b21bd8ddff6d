"""
Bucketing: many small collectives become few large ones.

    bucket_assignment         which tensors share a bucket, by size
    broadcast                 parameters and buffers sent from one rank in buckets
    reduce_scatter_bucketer   small reduce-scatters, coalesced
"""
