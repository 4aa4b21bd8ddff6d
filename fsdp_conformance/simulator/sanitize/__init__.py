"""
Training scripts under the checker: `fsdp-conformance sanitize`. What starts the ranks is above (`script_ranks`).

    order             the script, and how to run it
    script            runs the script in a rank
    observer          what a rank observes while the script runs
    forked_process    a process that a script forks from its rank
    rank_children     processes that a script starts from its ranks
    report            findings merged over ranks, the verdict and the exit status
    alerts            findings with their rules and lines, for code hosts
"""
