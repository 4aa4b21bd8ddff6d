"""
Chunks: the flat storage of a unit, sharded over a group and gathered when it is needed.

    chunk                one chunk, from registering tensors to reducing their gradients
    config               how a chunk stores, gathers and reduces
    layout               where each tensor lies in the chunk and in each rank's shard
    state                the states of a chunk and its tensors, and the legal moves between them
    checks               what a chunk verifies before it does as told
    payload              the memory a chunk is unsharded in
    gathering            an all-gather in flight
    gradients            where gradients are collected and how they are reduced
    gradient_buffer      the flat buffer that gradients are collected in
    reduction            a reduction in flight
    partner              pairs of chunks: low precision for computing, float32 for updating
    moving               chunks whose owner binds tensors to views itself
    transfer             whole tensors out of a chunk and back into it

    group                all chunks of a model, on one memory pool
    fetcher              brings chunks into limited memory and chooses which ones leave
    search               the chunk size that wastes least
    memory_pool          blocks of memory, leased within a limit
    streams              the gather and reduce streams, and the events that order them
"""
