"""
Bucketing: many small collectives become few large ones.

    bucket_assignment         which tensors share a bucket, by size
    broadcast                 sends parameters and buffers of one rank to the others, in buckets
    reduce_scatter_bucketer   coalesces small reduce-scatters
"""
