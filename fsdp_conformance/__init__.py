"""
The conformance suite for sharded data-parallel training in PyTorch, and the reference engine that it certifies.

Words, in the order in which they may use one another:
    status         exit statuses
    verdict        what a run can say about a case
    capability     the flags that an implementation declares
    codec          typed values to JSON and back, strictly
    visible        control characters of others as escapes
    user_modules   imports of modules that a user names
    suggestions    the choices that a mistyped word was probably meant to be
    stack          whose code a stack frame is: the user's, torch's, Python's or ours
    listing        lists of names in sentences
    outcome        findings, reports of ranks, how ranks ended
    errors         everything that can go wrong, a class for each kind
    stress         what a stress run provokes, and how often that struck
    plan           how an implementation is to shard: what an adapter is given
    run_settings   the settings of a run, from the command line to every rank
    scenarios      the space of trainings: axes, values, rows that cover every pair
    workload       a model with its batches, and how to train it
    contract       the requirements, the cases as data, and the profiles
    history        what was observed: losses, gradients, collectives, memory
    recordings     what `record` writes: trainings of users' own, as fingerprints

Running and observing:
    harness        ranks: processes, simulated, or started by torchrun
    faults         delays and pauses that a case injects
    simulator      the simulated accelerator, with its race checker

Judging:
    references     independent trainings to compare with, and the bounds
    diagnosis      the likely cause of a difference, and the finding that says most
    checks         oracles: comparisons of histories with the references
    judge          the verdict on a case

Engines:
    engine         the reference sharding engine
    planner        what a way to shard a model costs, and which one to choose
    adapters       the seam between the suite and an engine, and the bundled adapters
    driver         the loop that trains an adapter and observes it
    mutants        engines with one known defect each

Cases and reports:
    cases          the base class of cases, and what their bodies may call
    selftest       single cases in this process
    explore        scenarios that are drawn, not listed
    repro          a case as a script that does not need this package
    report         the run file, the certificate, and texts for people

Ways in:
    pytest_plugin  pytest
    simulated_cuda
                   simulated GPUs for any tests, notebooks and functions
    script_ranks   training scripts on ranks of the harness, for `sanitize`
    recorder       records users' own trainings, for `record` and `parity`; takes the sharding out of a script
    parity         two recordings compared: where they differ first, and whose fault that is
    cli            the command fsdp-conformance

The cases themselves are in `fsdp_conformance.suites`, their models and batches in `fsdp_conformance.fixtures`; in a
checkout both lie at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_conformance.parity.assertion import assert_same_training
    from fsdp_conformance.pytest_plugin.embedded import conformance_tests
    from fsdp_conformance.recorder.process import recording

__all__ = ["__version__", "assert_same_training", "conformance_tests", "recording"]

__version__ = "2026.11.0"


def __getattr__(name: str) -> Any:
    # Imported on first use: every command imports this package first.
    if name == "conformance_tests":
        from fsdp_conformance.pytest_plugin.embedded import conformance_tests

        return conformance_tests
    if name == "recording":
        from fsdp_conformance.recorder.process import recording

        return recording
    if name == "assert_same_training":
        from fsdp_conformance.parity.assertion import assert_same_training

        return assert_same_training
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
