"""
Replicated training: every rank holds the whole module, and gradients are averaged during backward.

    data_parallel        `DataParallel(module)`
    reducer              averages gradients bucket by bucket while backward runs
    gradient_buckets     buckets in the order of their reductions: buffers, copies, collectives
    autograd_hooks       the hooks that report a finished gradient and the end of a backward
    parameter_use        which parameters a step uses, and how often
    communication_hook   user-defined reductions
    join                 ranks with fewer inputs than the others
"""

from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel

__all__ = ["DataParallel"]
