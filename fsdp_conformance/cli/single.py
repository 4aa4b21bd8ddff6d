"""`smoke` and the commands about one case work in their own process: it imports torch, and the ranks are forked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_conformance.cli import chosen_cases, messages
from fsdp_conformance.cli.survey import survey
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import FINE, Verdict

if TYPE_CHECKING:
    from fsdp_conformance.selftest.cases import BoundCase


def prepare(device: str, implementation: str) -> None:
    """
    Import torch, fork the server of the ranks, and look at the machine and at the adapter.

    Raises EnvironmentUnavailable for a device that is missing, and AdapterError for an adapter that cannot be loaded.
    """
    from fsdp_conformance.harness.processes.forkserver import import_and_fork

    import_and_fork()
    chosen_cases.check_device(survey(device, implementation, fork=True).machine)


def bound(case_id: str) -> BoundCase:
    """The case and its body. Raises UsageError, with the nearest ids, if there is none."""
    from fsdp_conformance.selftest.cases import bound_cases

    cases = {each.case.id: each for each in bound_cases()}
    if case_id not in cases:
        hint = messages.did_you_mean(case_id, cases) or ". `fsdp-conformance list` shows all cases."
        raise UsageError(f"CASE must be the id of a case, such as R001/exact-probe-ws2, got {case_id!r}{hint}")
    return cases[case_id]


def status_of(record: CaseRecord) -> Status:
    """The exit status of a command that judged one case."""
    if record.verdict is Verdict.NOT_RUN_ENV:
        return Status.ENVIRONMENT
    if record.verdict is Verdict.ERROR_SUITE:
        return Status.SUITE
    return Status.CERTIFIED if record.verdict in FINE else Status.NOT_CERTIFIED
