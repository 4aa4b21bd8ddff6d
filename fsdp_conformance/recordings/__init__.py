"""
Recordings of training runs: what `fsdp-conformance record` writes, and `fsdp-conformance parity` compares. No torch.

    fingerprint    a tensor as a hash and a sketch that add up over its shards
    events         what a rank did, in the order in which it did it
    files          a recording: a directory with a file of each rank
    stacks         where the processes of a command are when its time is over
"""
