"""
Ranks on several hosts: torchrun starts one worker per rank, and all workers run the same cases in the same order.

    worker               how the workers of a case meet and exchange results
    interface            the network interface by which a host reaches the others
"""
