"""
Studies of the simulated accelerator: programs that show what its race checker finds, and what it does not.

Scripts and tests share them. Import them as `studies`: `ci/` is on the path of its scripts, and pytest's `pythonpath`
adds it for the tests.

    seeded_races       races of real projects, put back: the checker must find them (test_studies.py)
    stream_trainings   136 configurations of torch's engines, which execute all of their synchronisations in training
    stream_engines     how DDP, FSDP1 and FSDP2 wrap a model for such a configuration
    stream_models      their models and data
    stream_runs        one training on one rank
    stream_ranks       a function on freshly forked ranks
    stream_study       trainings under the checker, each without some of its waits

Three scripts run them:

- `ci/race-freedom`: no hazard in any training, and the CPU's results bit for bit.
- `ci/sync-sites`: each synchronisation dropped on its own; the results are in `ci/sync-sites.toml`.
- `ci/bench/run simulator`: a training step on the simulated accelerator compared with the CPU.

docs/simulated-accelerator.md has the results.
"""
