"""
Replicated training: every rank holds the whole module, and gradients are averaged during backward.

    data_parallel        `DataParallel(module)`
    reducer              averages gradients bucket by bucket while backward runs
    reducer_config       options of the reducer
    reducer_checks       what the reducer rejects
    bucket_queue         buckets in the order in which they are reduced
    gradient_bucket      one bucket: its buffer, its copies, its collective
    gradient_hooks       hooks on parameters that report a finished gradient
    backward_watch       notices when a backward ends, or raises
    communication_hook   user-defined reductions
    sparse_sum           the sum of sparse gradients over ranks
    static_graph         how often each parameter is used in a graph that never changes
    unused_parameters    which parameters took no part in a backward
    join                 ranks with fewer inputs than the others
"""

from fsdp_conformance.engine.data_parallel.data_parallel import DataParallel

__all__ = ["DataParallel"]
