"""
The commands, a module each: `main` takes the parsed arguments and returns the exit status.

    init            an adapter to fill in, tests and a workflow, written into a repository
    run             run cases in a pytest process, follow them, and judge them at the end
    smoke           check the adapter by itself
    sanitize        run a training script on the simulated accelerator
    record          run a command, and record what its processes train
    parity          find where sharded training first differs from unsharded training
    plan            find out how to shard a model, from a cost model
    doctor          check what this machine can run
    explore         draw models, configurations and schedules, and shrink what fails
    selftest        show that known-wrong engines are killed, and correct ones are not
    debug           one case with one rank in the foreground, for a debugger
    replay          a case once more as in a run: the same verdict, the same finding, how often
    repro           a case as a script that does not need this package
    listing         `list`: the cases and whether they would run
    explain         a requirement or a case, with what a run found
    verify          the verdict, derived again from a run file
    compare         the verdicts that differ between two runs
    trend           stored runs in the order of their dates
    export          a run in a format that another program reads
    scoreboard      several engines side by side
    update_expectations  the failures of a run, written into conformance.toml
    completion      scripts that complete the command in a shell
"""
