"""
Simulated ranks: the ranks of one world as threads of one process, which take turns.

    ranks                `run_ranks(world_size, function)`
    scheduler            which rank has the turn, and when all of them are stuck
    state                what Python and torch keep once per process, switched with the turn
    group                the process group of simulated ranks
    arguments            what a backend refuses before it communicates
    meeting              one collective: what each rank brings, and what it gets
    store                their rendezvous store
    host                 the process that runs all ranks of a case
"""

from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks

__all__ = ["run_ranks"]
