"""
Sharded flat storage, and the chunk component on top of it.

    storage         tensors laid out flat, sharded over a group, gathered on demand
    gradients       the buffer that collects a storage's gradients, and their reduction
    layout          where each tensor lies in a storage and in each rank's shard
    memory_pool     blocks of memory, leased within a limit

    chunk           storage whose tensors have states, with its own or shared blocks, and a partner
    tensor_state    the states of the tensors in a chunk, and the legal moves between them
    group           all chunks of a model, on one memory pool
    fetcher         gathers chunks into limited memory and chooses which ones to evict

The fully sharded module uses the storage and its gradients directly. The chunk component is for the suite's chapter AC.
"""
