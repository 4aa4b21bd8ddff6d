"""
Studies: programs that show what the suite finds, and what it does not; most are about the simulated accelerator.

Scripts and tests share them. Import them as `studies`: `ci/` is on the path of its scripts, and pytest's `pythonpath`
adds it for the tests.

    seeded_races       races of real projects, put back: the checker must find them (test_studies.py)
    stream_trainings   136 configurations of torch's engines, which execute all of their synchronisations in training
    stream_engines     how DDP, FSDP1 and FSDP2 wrap a model for such a configuration
    stream_models      their models and data
    stream_runs        one training on one rank
    stream_ranks       a function on freshly forked ranks
    stream_study       trainings under the checker, each without some of its waits
    kill_matrix        which cases kill which known-wrong engines, and which cases kill too few

Four scripts run them:

- `ci/race-freedom`: no hazard in any training, and the CPU's results bit for bit.
- `ci/sync-sites`: each synchronisation dropped on its own; the results are in `ci/sync-sites.toml`.
- `ci/kill-matrix`: cases and known-wrong engines.
- `ci/bench/run simulator`: a training step on the simulated accelerator compared with the CPU.

docs/simulated-accelerator.md has the results.
"""
