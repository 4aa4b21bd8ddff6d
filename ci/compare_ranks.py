"""The same cases on each kind of ranks: see ci/compare-ranks."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fsdp_conformance.cli import arguments, selection
from fsdp_conformance.cli.messages import complain, plural
from fsdp_conformance.config import RANKS
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import ConfigError, ConformanceError, RunFileError
from fsdp_conformance.outcome import CaseRecord
from fsdp_conformance.report import runfile
from fsdp_conformance.report.runfile import RunFile
from fsdp_conformance.status import Status
from fsdp_conformance.verdict import Verdict

#: Statuses of a run that finished.
_JUDGED = (Status.CERTIFIED, Status.NOT_CERTIFIED)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and those of the runs."""
    parser = arguments.Parser(prog="ci/compare-ranks", description="The same cases on each kind of ranks.")
    parser.add_argument("implementation", metavar="IMPLEMENTATION")
    parser.add_argument("--ranks", default=",".join(RANKS), metavar="KINDS", help=f"default: {','.join(RANKS)}")
    parser.add_argument("--report", metavar="DIR", help="keep the run files in DIR/KIND")
    parser.add_argument("-n", dest="workers", metavar="N", help="pytest workers, except for torchrun")
    return parser.parse_known_args(argv)


def kinds_of(text: str) -> list[str]:
    """The kinds of ranks that were named. Raises ConfigError unless there are at least two, all known."""
    kinds = list(dict.fromkeys(text.split(",")))
    problems = [f"ranks must be one of {', '.join(RANKS)}, got {kind!r}" for kind in kinds if kind not in RANKS]
    if len(kinds) < 2:
        problems.append(f"ranks must be at least two kinds, got {text!r}")
    if problems:
        raise ConfigError(problems, where="ci/compare-ranks")
    return kinds


def largest_world(implementation: str, options: Sequence[str]) -> int:
    """The largest world size of the selected cases. Raises SystemExit or ConformanceError for wrong options."""
    parsed = arguments.parse(["run", "--implementation", implementation, *options])
    settings = arguments.settings_of(parsed)
    return max(case.world_size for case in selection.selected(load_profile(settings.profile), settings))


def words_of(kind: str, world_size: int, logs: Path) -> list[str]:
    """The beginning of the command for a run on that kind of ranks. `logs` is for torchrun's agent."""
    command = ["fsdp_conformance", "run", "--ranks", kind]
    if kind == "torchrun":
        agent = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        # By default the agent makes a directory that nothing removes.
        agent += ["--log-dir", str(logs)]
        return [sys.executable, "-m", *agent, "-m", *command]
    return [sys.executable, "-m", *command]


def run(words: Sequence[str]) -> int:
    """Run a command to its end. Its exit status."""
    process = subprocess.Popen(words)
    # Ctrl-C reaches the run as well, which then ends in order; wait for it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, before)


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


def compare(argv: Sequence[str], directory: Path) -> int:
    """Run, and print the table. `directory` is for files that are not kept. Returns the exit status."""
    parsed, options = parse(argv)
    kinds = kinds_of(parsed.ranks)
    world_size = largest_world(parsed.implementation, options)
    report = Path(parsed.report) if parsed.report else directory
    runs = {}
    for kind in kinds:
        print(f"\n== {kind}", flush=True)
        workers = ["-n", parsed.workers] if parsed.workers and kind != "torchrun" else []
        status = run(
            [
                *words_of(kind, world_size, directory / "logs"),
                *("--implementation", parsed.implementation, "--report", str(report / kind)),
                *workers,
                *options,
            ]
        )
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
    with tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as directory:
        try:
            return compare(argv, Path(directory))
        except ConformanceError as error:
            complain(error)
            return int(error.exit_status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
