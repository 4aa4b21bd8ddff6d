"""
Simulated ranks: the ranks of one world as threads of one process, which take turns.

    ranks                `run_ranks(world_size, body)`
    scheduler            whose turn it is, and when all of them are stuck
    state                the random state, variables and logs that belong to one rank
    group                the process group of simulated ranks
    meeting              one collective: who brought what, and what each rank gets
    store                the store at which they meet
    host                 the process that they live in
"""

from fsdp_conformance.harness.simulated_ranks.ranks import run_ranks

__all__ = ["run_ranks"]
