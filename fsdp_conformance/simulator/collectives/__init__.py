"""
Collectives that differ between ranks.

    agreement         compares the collectives of the ranks of a script
    compared_groups   compares those of processes that meet in `init_process_group`, under pytest too
    new_groups        compares the calls of `new_group`
    device_order      finds devices that wait for each other
    calls             the collectives that each rank has called, in files
    disagreement      a finding about the collectives of several ranks
"""
