"""The same cases on each kind of ranks: see ci/compare-ranks."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from two_hosts import TwoHosts

from fsdp_conformance.cli import arguments, chosen_cases
from fsdp_conformance.cli.child import end_family
from fsdp_conformance.cli.messages import complain, plural
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import ConfigError, ConformanceError, EnvironmentUnavailable, RunFileError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import runfile
from fsdp_conformance.report.runfile import RunFile
from fsdp_conformance.run_settings import RANKS
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import Verdict

#: torchrun on two hosts: not a kind of ranks to the suite, but one to compare.
HOSTS = "hosts"
KINDS = (*RANKS, HOSTS)

#: The port on which the agents of the two hosts meet. Only this script uses these hosts, so it is free.
_PORT = 29400

#: How long the second host may take to end after the first, which judges.
_END_S = 60.0

#: Statuses of a run that finished.
_JUDGED = (Status.CERTIFIED, Status.NOT_CERTIFIED)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and those of the runs."""
    parser = arguments.Parser(prog="ci/compare-ranks", description="The same cases on each kind of ranks.")
    parser.add_argument("implementation", metavar="IMPLEMENTATION")
    parser.add_argument(
        "--ranks", default=",".join(RANKS), metavar="KINDS", help=f"of {', '.join(KINDS)} (default: {','.join(RANKS)})"
    )
    parser.add_argument("--report", metavar="DIR", help="keep the run files in DIR/KIND")
    parser.add_argument("-n", dest="workers", metavar="N", help="pytest workers, except for torchrun and hosts")
    parser.add_argument("--delay-ms", type=float, default=0.0, metavar="X", help="of a packet between two hosts")
    parser.add_argument("--loss", type=float, default=0.0, metavar="P", help="probability that a packet is lost")
    return parser.parse_known_args(argv)


def kinds_of(text: str) -> list[str]:
    """The kinds of ranks that were named. Raises ConfigError unless there are at least two, all known."""
    kinds = list(dict.fromkeys(text.split(",")))
    problems = [f"ranks must be one of {', '.join(KINDS)}, got {kind!r}" for kind in kinds if kind not in KINDS]
    if len(kinds) < 2:
        problems.append(f"ranks must be at least two kinds, got {text!r}")
    if problems:
        raise ConfigError(problems, where="ci/compare-ranks")
    return kinds


def largest_world(implementation: str, options: Sequence[str]) -> int:
    """The largest world size of the selected cases. Raises SystemExit or ConformanceError for wrong options."""
    parsed = arguments.parse(["run", "--implementation", implementation, *options])
    settings = arguments.settings_of(parsed)
    return max(case.world_size for case in chosen_cases.selected(load_profile(settings.profile), settings))


def words_of(kind: str, world_size: int, logs: Path) -> list[str]:
    """The beginning of the command for a run on that kind of ranks. `logs` is for torchrun's agent."""
    command = ["fsdp_conformance", "run", "--ranks", kind]
    if kind == "torchrun":
        agent = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        # By default the agent makes a directory that nothing removes.
        agent += ["--log-dir", str(logs)]
        return [sys.executable, "-m", *agent, "-m", *command]
    return [sys.executable, "-m", *command]


def words_on_hosts(hosts: TwoHosts, world_size: int, logs: Path) -> list[list[str]]:
    """The beginning of the command for each of two hosts, the one that judges first."""
    workers = (world_size + 1) // 2
    found = []
    for host in range(2):
        agent = ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(host)]
        agent += ["--nproc-per-node", str(workers), "--master-addr", hosts.addresses[0], "--master-port", str(_PORT)]
        agent += ["--log-dir", str(logs / f"host{host}")]
        command = [sys.executable, "-m", *agent, "-m", "fsdp_conformance", "run", "--ranks", "torchrun"]
        found.append(hosts.words(host, command))
    return found


def run_on_hosts(commands: Sequence[Sequence[str]], log: Path) -> int:
    """Run a command on each host; what the second one says goes to `log`. The exit status of the first."""
    with log.open("wb") as file:
        second = subprocess.Popen(
            commands[1], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = run(commands[0])
            second.wait(_END_S)
        except subprocess.TimeoutExpired:
            complain(f"the second host had not ended {_END_S:.0f} s after the first, and was killed: {log}")
        finally:
            if second.poll() is None:
                end_family(second.pid)
                second.wait()
    return status


def run(words: Sequence[str]) -> int:
    """Run a command to its end. Its exit status. If this process is told to end, so is the command."""
    process = subprocess.Popen(words)
    # Ctrl-C reaches the run as well, which then ends in order; wait for it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
        if process.returncode is None:
            end_family(process.pid)
            process.wait()


def finished(path: Path, status: int) -> RunFile:
    """
    The run file of a run that ended with that status.

    Raises RunFileError if the run did not finish.
    """
    if status not in _JUDGED:
        raise RunFileError(f"the run of {path} did not finish: it ended with status {status}")
    found = runfile.read(path)
    if found.aborted or found.problems:
        raise RunFileError(f"{found.path}: {'; '.join(found.problems) or 'the run did not finish'}")
    return found


def needs_processes(record: CaseRecord) -> bool:
    """Whether a case was not run because its ranks must be processes, so that its verdict cannot differ."""
    return record.verdict is Verdict.NOT_RUN_ENV and record.measurements.get("absent") == ["processes"]


def differing(runs: Mapping[str, RunFile]) -> Iterator[dict[str, CaseRecord | None]]:
    """For each case whose verdicts differ, its record by kind of ranks; None if the run has no verdict."""
    by_kind = {kind: {record.case: record for record in run.records} for kind, run in runs.items()}
    for case in dict.fromkeys(case for records in by_kind.values() for case in records):
        found = {kind: records.get(case) for kind, records in by_kind.items()}
        judged = [record for record in found.values() if record is None or not needs_processes(record)]
        if len({record.verdict if record is not None else None for record in judged}) > 1:
            yield found


def table(runs: Mapping[str, RunFile]) -> tuple[list[str], int]:
    """The lines to print, and how many verdicts differ."""
    differences = list(differing(runs))
    ids = {record.case for run in runs.values() for record in run.records if record.verdict is not Verdict.DISABLED}
    lines = [_row("case", runs)]
    for found in differences:
        case = next(record.case for record in found.values() if record is not None)
        lines.append(_row(case, (record.verdict if record is not None else "no verdict" for record in found.values())))
        lines += [
            f"  {kind}: {record.reason}" for kind, record in found.items() if record is not None and record.reason
        ]
    lines.append(_row("seconds", (f"{(run.footer or {}).get('seconds', 0.0):.1f}" for run in runs.values())))
    for kind, run in runs.items():
        left_out = sum(needs_processes(record) for record in run.records)
        lines += [f"not run on {kind} ranks (need processes): {plural(left_out, 'case')}"] if left_out else []
    lines.append(f"compare-ranks: {len(differences)} of {len(ids)} verdicts differ")
    return lines, len(differences)


def _row(first: str, cells: Iterable[str]) -> str:
    return f"{first:44}" + "".join(f"{cell:>14}" for cell in cells)


def check_link(parsed: argparse.Namespace, kinds: Sequence[str]) -> None:
    """Raise ConfigError for a link that cannot be made, or that no run would use."""
    problems = []
    if parsed.delay_ms < 0:
        problems.append(f"delay_ms must not be negative, got {parsed.delay_ms:g}")
    if not 0 <= parsed.loss < 1:
        problems.append(f"loss must be at least 0 and less than 1, got {parsed.loss:g}")
    if HOSTS not in kinds and (parsed.delay_ms or parsed.loss):
        problems.append(f"delay_ms and loss are for {HOSTS}, got --ranks {parsed.ranks}")
    if problems:
        raise ConfigError(problems, where="ci/compare-ranks")


def compare(argv: Sequence[str], directory: Path) -> int:
    """Run, and print the table. `directory` is for files that are not kept. Returns the exit status."""
    parsed, options = parse(argv)
    kinds = kinds_of(parsed.ranks)
    check_link(parsed, kinds)
    world_size = largest_world(parsed.implementation, options)
    report = Path(parsed.report) if parsed.report else directory
    runs = {}
    for kind in kinds:
        link = f", {parsed.delay_ms:g} ms and {parsed.loss:.1%} of packets lost between them" if kind == HOSTS else ""
        print(f"\n== {kind}{link}", flush=True)
        given = ["--implementation", parsed.implementation, "--report", str(report / kind), *options]
        with ExitStack() as resources:
            if kind == HOSTS:
                hosts = resources.enter_context(TwoHosts(delay_ms=parsed.delay_ms, loss=parsed.loss))
                commands = words_on_hosts(hosts, world_size, directory / "logs")
                status = run_on_hosts([[*words, *given] for words in commands], directory / "second-host.log")
            else:
                workers = ["-n", parsed.workers] if parsed.workers and kind != "torchrun" else []
                status = run([*words_of(kind, world_size, directory / "logs"), *given, *workers])
        try:
            runs[kind] = finished(report / kind, status)
        except RunFileError as error:
            complain(error)
            return status if status not in _JUDGED else Status.SUITE
    lines, number = table(runs)
    print("\n" + "\n".join(lines))
    return 1 if number else 0


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    # Two hosts outlive a process that ends without giving them back.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as directory:
        try:
            return compare(argv, Path(directory))
        except EnvironmentUnavailable as error:
            complain(f"{Verdict.NOT_RUN_ENV}: {error}")
            return Status.ENVIRONMENT
        except ConformanceError as error:
            complain(error)
            return int(error.exit_status)
        finally:
            signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
