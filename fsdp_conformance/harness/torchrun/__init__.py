"""
Ranks on several hosts: torchrun starts one worker for each rank, and all workers run the same cases in the same order.

    worker               what a worker does for each case
"""
