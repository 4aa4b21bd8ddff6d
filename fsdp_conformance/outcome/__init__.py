"""
The outcome of a case, as data: findings, the reports of ranks, and how their processes ended. Standard library only.

    records     findings, reports of ranks, records of cases
    endings     how each rank ended, and which one failed first
    mismatch    ranks that called different collectives and wait for each other
"""
