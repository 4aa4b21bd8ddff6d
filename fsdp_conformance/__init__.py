"""
The conformance suite for sharded data-parallel training in PyTorch, and the reference engine that it certifies.

Words, without torch:
    status         exit statuses
    errors         everything that can go wrong, a class for each kind
    verdict        what a run can say about a case
    capability     the flags that an implementation declares
    config         plans, settings, and the enums that they are made of
    settings       the settings of a run, from the command line to every rank
    case           a case, and the decorator that binds a test method to it
    events         what happens between steps or inside one, and every point where it can
    workload       a model with its batches, and how to train it
    frames         whose code a stack frame is: the user's, torch's, Python's or ours
    outcome        findings, reports of ranks, records of cases
    stress         what a stress run provokes, and how often that struck
    refusal        what counts as a refusal, and what is a breakdown
    contract       the requirements, and the profiles of cases
    judge          the verdict on a case
    packing        which cases run at the same time on the devices of a machine

Running and observing:
    history        what was observed: losses, gradients, collectives, memory
    harness        ranks: processes, simulated, or started by torchrun
    faults         delays and pauses that a case injects
    simulator      the simulated accelerator, with its race checker
    checks         comparisons of histories with the reference

Engines:
    engine         the reference sharding engine
    planner        what a way to shard a model costs, and which one to choose
    adapters       the seam between the suite and an engine
    mutants        engines with one known defect each

Cases and reports:
    testing        the base class of cases
    case_checks    the checks that cases call
    case_references
                   the references of a case, trained or taken from the store
    case_worlds    smaller worlds inside a case, and a directory for all of its ranks
    selftest       single cases in this process
    explore        scenarios that are drawn, not listed
    repro          a case as a script that does not need this package
    report         the run file, the certificate, and texts for people

Ways in:
    pytest_plugin  pytest
    own_tests      cases as tests of somebody's own test suite
    simulated_cuda
                   simulated GPUs for any tests, notebooks and functions
    cli            the command fsdp-conformance

The cases themselves are in `fsdp_conformance.suites`, their models and batches in `fsdp_conformance.fixtures`; in a
checkout both lie at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_conformance.own_tests import conformance_tests

__all__ = ["__version__", "conformance_tests"]

__version__ = "2026.11.0"


def __getattr__(name: str) -> Any:
    # Not imported before somebody asks: every command imports this package first.
    if name == "conformance_tests":
        from fsdp_conformance.own_tests import conformance_tests

        return conformance_tests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
