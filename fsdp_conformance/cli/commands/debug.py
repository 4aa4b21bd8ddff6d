"""
`fsdp-conformance debug`: run one case with one rank in the foreground, where `breakpoint()` finds the terminal.

The other ranks run as usual, and wait: no rank has a deadline. The verdict is printed but not recorded, because you may
have changed values.
"""

from __future__ import annotations

import argparse

from fsdp_conformance.cli import messages, single
from fsdp_conformance.cli.arguments import settings_of
from fsdp_conformance.cli.own_workload import with_workload
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import terminal
from fsdp_conformance.report.folding import screen_width
from fsdp_conformance.run_settings import OWN_MODEL
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import FINE, Verdict

#: The end of a traceback if the user left the debugger with `quit`.
_QUIT = "bdb.BdbQuit"


def main(arguments: argparse.Namespace) -> int:
    """Run the case. Returns the exit status of its verdict."""
    settings = settings_of(arguments)
    device = settings.device
    if not arguments.rank.isdecimal():
        raise ConfigError([f"--rank must be a rank, from 0, got {arguments.rank!r}"], where="debug")
    rank = int(arguments.rank)
    single.prepare(device, arguments.implementation)
    bound = single.bound(arguments.case)
    if rank >= bound.case.world_size:
        raise ConfigError(
            [f"--rank must be less than the world size {bound.case.world_size} of {bound.case.id}, got {rank}"],
            where="debug",
        )
    if bound.case.is_own and not settings.workload:
        raise ConfigError([f"{bound.case.id} trains your own model: add --workload FILE:FUNCTION"], where="debug")
    if settings.workload and not bound.case.is_own:
        problem = f"--workload is for cases of the profile {OWN_MODEL}, got {bound.case.id}, which has its own"
        raise ConfigError([problem], where="debug")
    settings = with_workload(settings, fork=True)
    from fsdp_conformance.harness.order import Debugged
    from fsdp_conformance.harness.processes.foreground import passing_on_interrupts
    from fsdp_conformance.selftest.cases import record_of

    messages.say(
        f"{bound.case.id} on {arguments.implementation}: rank {rank} of {bound.case.world_size} has this terminal; "
        "no deadline runs. Ctrl-C interrupts that rank.",
        arguments.implementation,
    )
    test = bound.owner(bound.method)
    test.debugged = Debugged(rank=rank, post_mortem=arguments.pdb)
    # A debugger can change values, which other runs must not pick up.
    test.shares_references = False

    def pid() -> int | None:
        return test.processes[rank].pid if len(test.processes) > rank else None

    with passing_on_interrupts(pid):
        record = record_of(test, settings)
    return _tell(record)


def _tell(record: CaseRecord) -> Status:
    """Print the verdict. Returns the exit status."""
    print()
    if record.traceback.rstrip().endswith(_QUIT):
        print(f"{record.case}: the debugger was left with quit, so nothing was judged")
        return Status.NOT_CERTIFIED
    if record.verdict is Verdict.PASS:
        print(f"✓ {record.case}  PASS   {record.comparisons} comparisons, {terminal.duration(record.seconds)}")
    elif record.verdict in FINE:
        print(f"- {record.case}  {record.verdict}  {record.reason}")
    else:
        print(terminal.render_failure(record, width=screen_width()))
    print("a debugged case certifies nothing, and no run file was written")
    return single.status_of(record)
