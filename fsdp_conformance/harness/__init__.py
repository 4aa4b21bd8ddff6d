"""
Ranks: starting them, watching them, ending them.

    testcase             `ShardedTrainingTestCase`, the base class of every case
    torch_compat         the base classes of PyTorch's own distributed tests, on our ranks
    torch_testing        imports torch's test modules without starting CUDA

    processes            ranks that are processes, forked from a warm server
    simulated_ranks      ranks that are threads of one process and take turns
    torchrun             ranks that torchrun has started, on one host or several
    recording            the process group that records every collective

    rank                 what runs in a rank, from its first line to its last
    environment          variables, seeds, threads and determinism of a rank
    rendezvous           the store at which ranks meet
    deadlines            the nested deadlines of a case
    attribution          which rank failed first
    devices              the devices of this machine and how many cases fit on them
    leases               no two cases share a GPU
    probe                one question answered in one fresh process
    exact_collectives    whether this machine can launch ranks and communicate exactly

This module imports nothing, so that `preload`, `deadlines` and `attribution` stay free of torch.
"""
