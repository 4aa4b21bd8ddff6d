"""
Studies: programs that measure how well the suite finds and names what it should.

Scripts and tests share them. Import them as `studies`: `ci/` is on the path of its scripts, and pytest's `pythonpath`
adds it for the tests.

What the race checker of the simulated accelerator finds, and what it does not:

    seeded_races       races of real projects, put back: the checker must find them (test_studies.py)
    stream_trainings   136 configurations of torch's engines, which execute all of their synchronisations in training
    stream_engines     how DDP, FSDP1 and FSDP2 wrap a model for such a configuration
    stream_models      their models and data
    stream_runs        one training on one rank
    stream_ranks       a function on freshly forked ranks
    stream_study       trainings under the checker, each without some of its waits

What `fsdp-conformance sanitize` finds in scripts, and what it leaves alone:

    script_defects     scripts with one mistake each, and the line of it
    script_controls    correct scripts that do unusual things
    script_runs        runs such scripts, and compares what was found

Which cases kill which known-wrong engines, and which cases kill too few:

    kill_matrix        a case against engines beyond those that it names

Whether a report names the right cause:

    causes             the cause of each known defect, and how an answer is scored
    cause_recording    in a rank: the evidence of every explanation, kept to be explained again
    small_engine       a sharded engine in a few functions
    small_defects      that engine with one defect each

Six scripts run them:

- `ci/race-freedom`: no hazard in any training, and the CPU's results bit for bit.
- `ci/sync-sites`: each synchronisation dropped on its own; the results are in `ci/sync-sites.toml`.
- `ci/sanitize-power`: mistakes found and missed in scripts, and false alarms.
- `ci/causes`: the first cause of each known defect is right, one of several, unknown or wrong.
- `ci/kill-matrix`: cases and known-wrong engines.
- `ci/bench/run simulator`: a training step on the simulated accelerator compared with the CPU.

docs/simulated-accelerator.md has the results on races, docs/reading-a-verdict.md those on causes.
"""
