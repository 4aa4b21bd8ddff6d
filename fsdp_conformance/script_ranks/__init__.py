"""
Ranks that run a training script: the harness starts and supervises them, the simulated accelerator checks them.

    launch            a training script on N ranks
    rank              a rank that runs the script
    patience          process groups of a script that is debugged
    recorded_calls    compares the collectives that the harness records
    endings           how the ranks ended, for the report
"""
