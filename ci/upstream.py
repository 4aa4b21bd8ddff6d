"""PyTorch's own distributed tests on our ranks: see ci/upstream."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from fsdp_conformance.cli import arguments
from fsdp_conformance.cli.child import end_family, family
from fsdp_conformance.cli.messages import complain
from fsdp_conformance.cli.signals import Stopped, caught, raised
from fsdp_conformance.errors import ConformanceError, EnvironmentUnavailable, UsageError

CI = Path(__file__).resolve().parent
sys.path.append(str(CI))

import upstream_known  # noqa: E402  # beside this file, which tests run from elsewhere
from upstream_known import KnownTests  # noqa: E402

#: The files of each group, below test/distributed. The first group that has a file keeps it.
GROUPS = {
    "fsdp1": ("fsdp/test_*.py",),
    "fsdp2": ("_composable/fsdp/test_*.py", "_composable/test_composability/test_*.py"),
    "dtensor": ("tensor/test_*.py", "tensor/*/test_*.py", "_tensor/test_*.py", "test_device_mesh.py"),
    "ddp": ("_composable/test_replicate*.py", "algorithms/*/test_*.py", "test_distributed_spawn.py"),
    "c10d": ("test_c10d_*.py", "test_store.py", "test_pg_wrapper.py", "test_functional_api.py", "test_fake_pg.py"),
}

SUBJECTS = ("torch", "reference")
RANKS = ("cpu", "simulated")

#: What ci/upstream_world.py changes for the tests beside the harness, by kind of ranks and by subject.
ADAPTATIONS = {
    "cpu": (
        "cuda is the CPU, nccl is gloo; memory statistics are 0, streams and events do nothing",
        "tests for CUDA alone are made for the CPU, with two devices",
        "tests of parity leave out models that are offloaded and then moved, which must fail on a GPU",
        "DDP ignores device_ids; no device_id, or an index as one, means the CPU",
    ),
    "simulated": (
        "races between ranks that are threads fail no test: torch's group of threads copies on one thread's stream",
    ),
    "reference": (
        "use_orig_params=False is taken as True: the engine has nothing else",
        "attributes that tests read are added: sharding_strategy, cpu_offload, training_state, world_size and others",
        "tests can read where a unit's data are, as from torch's FlatParameter: its shard, gradient, device and sizes",
        "ShardedGradScaler is the engine's, too; a group that only knows its size is one of torch's that sends nothing",
    ),
}

#: What a file imports first.
_PREFACE = "import upstream_world  # noqa: the harness of ci/upstream\n"

#: How long a file's tests may take to leave after they were interrupted.
_GRACE_S = 20.0

#: Seconds between two looks whether a file has taken too long, or a signal has come.
_LOOK_S = 0.2


@dataclass(slots=True)
class Outcome:
    """The tests of one file."""

    file: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """The reason, in one line, by the name of the test."""
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    broken: str = ""
    """Why the file did not run to its end; "" if it did."""


# --- where the tests come from ----------------------------------------------------------------------------------------


def copy_tests(source: Path, target: Path) -> None:
    """Copy the Python files of a checkout's test/distributed. Raises UsageError if that is not what it is."""
    if not (source / "fsdp").is_dir():
        raise UsageError(f"--tests must be the directory test/distributed of a checkout of PyTorch, got {source}")
    shutil.copytree(source, target, ignore=_only_python, dirs_exist_ok=True)


def _only_python(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or (Path(directory) / name).is_dir())]


def unpack_tests(archive: Path, target: Path) -> None:
    """Take test/distributed out of a source archive. Raises UsageError if it has none, or is none."""
    found = 0
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                _, inside, path = member.name.partition("/test/distributed/")
                if inside and path.endswith(".py") and member.isfile():
                    member.name = path
                    packed.extract(member, target, filter="data")
                    found += 1
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"--archive must be a source archive of PyTorch, got {archive}: {error}") from error
    if not found:
        raise UsageError(f"--archive must have a directory test/distributed, got {archive}, which has none")


def download_tests(target: Path, release: str) -> None:
    """
    Take them from Debian's source package: the newest version of a release, such as "2.6", that can be downloaded; ""
    means any. Raises EnvironmentUnavailable if there is none.
    """
    offered = debian_versions(_run_apt("apt-cache", "showsrc", "--only-source", "pytorch", timeout_s=60).stdout)
    problem = f"it has {', '.join(offered) or 'none'}"
    for version in offered:
        if not f"{version}.".startswith(f"{release}." if release else ""):
            continue
        with tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as directory:
            command = ("apt-get", "source", "--download-only", f"pytorch={version}")
            done = _run_apt(*command, timeout_s=600, directory=directory)
            archives = list(Path(directory).glob("*.orig.tar.*"))
            if not done.returncode and archives:
                unpack_tests(archives[0], target)
                return
            problem = f"{version}: {(done.stderr.strip().splitlines() or ['no archive'])[-1]}"
    raise EnvironmentUnavailable(
        f"apt has no source package pytorch {release}".rstrip() + f" ({problem}). It needs a deb-src line in apt's "
        "sources; with a checkout of PyTorch use --tests, with a source archive --archive"
    )


def debian_versions(said: str) -> list[str]:
    """The versions that `apt-cache showsrc` has named, the newest first."""
    found = set(re.findall(r"^Version: (\S+)$", said, re.MULTILINE))
    return sorted(found, key=lambda version: [int(part) for part in re.findall(r"\d+", version)], reverse=True)


def _run_apt(*command: str, timeout_s: float, directory: str = ".") -> subprocess.CompletedProcess[str]:
    """Raises EnvironmentUnavailable if the command cannot be run, or takes longer."""
    try:
        return subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentUnavailable(f"{' '.join(command)} did not work: {error}") from error


def prefaced(text: str) -> str:
    """A test file that imports our world before anything else."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if re.match(r"(import|from)\s", line) and not line.startswith("from __future__"):
            return "".join([*lines[:number], _PREFACE, *lines[number:]])
    return text


def files_of(tests: Path, groups: Sequence[str], patterns: Sequence[str]) -> dict[str, list[str]]:
    """The files of each group, below `tests`; only those that match one of `patterns`, if there are any."""
    taken: set[str] = set()
    found: dict[str, list[str]] = {}
    for group in groups:
        names = sorted(
            {path.relative_to(tests).as_posix() for pattern in GROUPS[group] for path in tests.glob(pattern)} - taken
        )
        taken |= set(names)
        found[group] = [
            name for name in names if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ]
    return found


# --- running them -----------------------------------------------------------------------------------------------------


def run_file(
    tests: Path,
    file: str,
    *,
    subject: str,
    ranks: str,
    limit_s: float,
    options: Sequence[str],
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """
    Run the tests of one file in a pytest of its own. It is ended, with everything it has started, if it takes longer
    than `limit_s`, and as soon as `stopped` says so.
    """
    report = tests / f"{file}.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
    command += ["--simulate-cuda=4"] if ranks == "simulated" else []
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, str(tests / file)],
        cwd=(tests / file).parent,
        env=_environment(tests, subject, ranks),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    said = None
    while said is None and not stopped() and time.monotonic() - began < limit_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, _ = process.communicate(timeout=_LOOK_S)
    broken = ""
    if said is None:
        said, broken = _end(process), "was interrupted" if stopped() else f"did not end within {limit_s:g} s"
    outcome = read_report(report, file) if report.is_file() else read_progress(said, file)
    outcome.seconds = time.monotonic() - began
    # 5: no test was collected, as in a file that is for other hardware.
    if not broken and not report.is_file():
        broken = next((line for line in reversed(said.splitlines()) if line.strip()), "no output")
    outcome.broken = "; ".join(filter(None, [broken, outcome.broken]))
    return outcome


def _environment(tests: Path, subject: str, ranks: str) -> dict[str, str]:
    paths = [str(CI), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "FSDP_CONFORMANCE_UPSTREAM_SUBJECT": subject,
        "FSDP_CONFORMANCE_UPSTREAM_RANKS": ranks,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Some of torch's base classes show C++ frames in every message, and addr2line needs many seconds for them.
        "TORCH_DISABLE_ADDR2LINE": "1",
        "TORCH_SYMBOLIZE_MODE": "fast",
        # Tests of DDP that want to be told, instead of asking.
        "BACKEND": "nccl" if ranks == "simulated" else "gloo",
        "WORLD_SIZE": "2",
        "INIT_METHOD": "",
        "TEMP_DIR": tempfile.gettempdir(),
    }


def _end(process: subprocess.Popen[str]) -> str:
    """Interrupt a pytest, so that it says how far it came, and kill what is left of it. Returns what it said."""
    with contextlib.ExitStack() as opened:
        # Those in sessions of their own cannot be found once pytest has ended: handles stay theirs, unlike numbers.
        members = [_handle(pid, opened) for pid in family(process.pid) - {process.pid}]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        deadline = time.monotonic() + _GRACE_S
        while process.poll() is None and time.monotonic() < deadline:
            # It reads, too: a pytest that has much to say would wait for a reader.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_LOOK_S)
        if process.returncode is None:
            end_family(process.pid)
        for member in filter(None, members):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(member, signal.SIGKILL)
        return process.communicate()[0]


def _handle(pid: int, opened: contextlib.ExitStack) -> int | None:
    """A handle of a process, which `opened` closes; None if the process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    opened.callback(os.close, handle)
    return handle


def knows_simulated_cuda() -> bool:
    """Whether this checkout's pytest plugin offers simulated GPUs to any test."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--help"], cwd=CI.parent, capture_output=True, text=True, check=False
    )
    return "--simulate-cuda" in done.stdout


# --- what came out ----------------------------------------------------------------------------------------------------


#: What pytest's report of its own end says about a file that calls `sys.exit(0)` at its top.
_LEAVES = "SystemExit: 0"


def read_report(path: Path, file: str) -> Outcome:
    """A JUnit file of pytest."""
    outcome = Outcome(file)
    for case in ET.parse(path).getroot().iter("testcase"):  # noqa: S314 - written by our own pytest
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if name == "pytest.internal" and problem is not None and (problem.text or "").rstrip().endswith(_LEAVES):
            outcome.skipped[name] = "the file ends the process, with success, when it is imported"
        elif problem is not None:
            outcome.failed[name] = reason_of(f"{problem.text or ''}\n{problem.get('message') or ''}")
        elif skip is not None:
            outcome.skipped[name] = (skip.get("message") or "").strip()
        else:
            outcome.passed.append(name)
    return outcome


#: A test as `pytest -v` prints it: what became of it is missing from the one that was running.
_PROGRESS = re.compile(r"^\S+?\.py::([^\s\[]+(?:\[.*?\])?) *(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)?", re.MULTILINE)


def read_progress(said: str, file: str) -> Outcome:
    """What a pytest that was ended had printed: it names its tests, but not why they failed."""
    outcome = Outcome(file)
    for found in _PROGRESS.finditer(said):
        name = found[1].replace("::", ".")
        if found[2] in ("PASSED", "XPASS"):
            outcome.passed.append(name)
        elif found[2] in ("FAILED", "ERROR"):
            outcome.failed[name] = "it failed before the file was ended"
        elif found[2]:
            outcome.skipped[name] = ""
        else:
            outcome.broken = f"it was in {name}"
    return outcome


#: How our harness begins, and how a traceback ends that is not a rank's.
_RAISED = re.compile(r"\brank \d+ raised (.+)")
_EXCEPTION = re.compile(r"^(?:E\s+)?(?:[\w.]*\.)?([A-Z]\w*(?:Error|Exception|Warning)(?:: .*)?)$")
_IN_TEST = re.compile(r"\bline (\d+), in (_?test_\w+)")
_IN_THREAD = re.compile(r"\bThread \d+ exited with exception:\s*(?:E\s+)?(Traceback.*)", re.DOTALL)
_RACE = re.compile(r"^(?:E\s+)?((?:read|write) after (?:read|write) on .+)$", re.MULTILINE)


def reason_of(text: str) -> str:
    """
    Why a test failed, in one line: what the first rank raised, or else the last exception, a race, or the last line.
    """
    thread = _IN_THREAD.search(text)
    if thread:
        text = re.split(r"Thread \d+ exited with exception:|The above exception was", thread[1])[0]
    raised = _RAISED.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = [match[1] for line in lines if (match := _EXCEPTION.match(line))]
    race = _RACE.search(text)
    if race and not raised and not last:
        return f"a race: {race[1]}"
    reason = raised[1] if raised else last[-1] if last else lines[-1] if lines else "no message"
    places = _IN_TEST.findall(text)
    # A bare assert says nothing but where it is.
    return f"{reason} at line {places[-1][0]} of {places[-1][1]}" if ": " not in reason and places else reason


#: Numbers, addresses and quoted names differ from test to test.
_DETAILS = ((re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]\d+)?"), "N"), (re.compile(r"/\S+/"), "…/"))


def grouped(reasons: Iterable[str]) -> list[tuple[int, str, str]]:
    """How many failures have which reason, most frequent first: number, what it is, an example."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for reason in reasons:
        key = reason
        for pattern, sign in _DETAILS:
            key = pattern.sub(sign, key)
        counts[key[:100]] += 1
        examples.setdefault(key[:100], reason)
    return [(number, kind_of(examples[key]), examples[key]) for key, number in counts.most_common()]


COMPILED = upstream_known.KINDS["compiled"]
RENAMED = upstream_known.KINDS["renamed"]

_KINDS = (
    (COMPILED, r"(?i)NotSimulated.*(graph|kernel)|\btriton|inductor|dynamo|torch\.compile|FileCheck"),
    (upstream_known.KINDS["refused"], r"Unsupported|NotSimulated|is not supported: "),
    ("a race", r"^a race: "),
    (upstream_known.KINDS["internals"], r"has no attribute '_|FlatParam|_handle|_fsdp_"),
    (RENAMED, r"cannot import name|No module named|has no attribute|unexpected keyword argument|required positional"),
    ("needs a GPU", r"(?i)\bcuda\b|nccl|accelerator"),
    ("did not end", r"RankTimedOut|HANG|deadline|timed out"),
    ("another message", r"AssertionError: \".*\" does not match \""),
    ("other numbers", r"not close|not equal|AssertionError: (Tensor|Scalar)|is not true|!= "),
)


def kind_of(reason: str) -> str:
    """A word for what lies behind a failure."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, reason)), "other")


def kinds_in(files: Iterable[Outcome], known: KnownTests) -> Counter[str]:
    """How many tests failed for which kind of reason: that of the list, or else what the reason looks like."""
    return Counter(
        known[each.file, test].kind if (each.file, test) in known else kind_of(reason)
        for each in files
        for test, reason in each.failed.items()
    )


def table(outcomes: Mapping[str, Sequence[Outcome]], known: KnownTests) -> list[str]:
    """Markdown: a line for each file, the sum of each group, then the reasons by group."""
    lines = ["| file | passed | failed | skipped | seconds | why |", "|---|--:|--:|--:|--:|---|"]
    for group, files in outcomes.items():
        lines += [_row(each.file, [each], _note(each, known)) for each in files]
        lines.append(_row(f"**{group}**", files))
    for group, files in outcomes.items():
        lines += ["", share(group, files, known), "", f"{group}, why tests failed:", ""]
        lines += list(_explained(files, known)) or ["- none did"]
        skips = grouped(reason for each in files for reason in each.skipped.values())
        lines += [f"- {number}, skipped: {example[:160]}" for number, _, example in skips]
    return lines


def _note(each: Outcome, known: KnownTests) -> str:
    kinds = [f"{number} {kind}" for kind, number in kinds_in([each], known).most_common()]
    return "; ".join([*kinds, *filter(None, [each.broken])])


def _explained(files: Sequence[Outcome], known: KnownTests) -> Iterable[str]:
    """The reasons of the list, then those of tests that are not in it."""
    listed = Counter(known[each.file, test] for each in files for test in each.failed if (each.file, test) in known)
    for entry, number in listed.most_common():
        yield f"- {number}, {entry.kind}: {entry.why}"
    others = [reason for each in files for test, reason in each.failed.items() if (each.file, test) not in known]
    for number, kind, example in grouped(others):
        yield f"- {number}, {kind}: {example[:240]}"


def share(group: str, files: Sequence[Outcome], known: KnownTests) -> str:
    """How many of the tests that ran have passed, with and without the failures that are `ELSEWHERE`."""
    passed = sum(len(each.passed) for each in files)
    kinds = kinds_in(files, known)
    aside = {kind: kinds[kind] for kind in upstream_known.ELSEWHERE if kinds[kind]}
    ran = passed + sum(kinds.values())
    left_out = ", ".join(f"{number} for {kind}" for kind, number in aside.items())
    without = f"; {_percent(passed, ran - sum(aside.values()))} without {left_out}" if aside else ""
    return f"{group}: {passed} of {ran} passed, {_percent(passed, ran)}{without}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none ran"


def _row(name: str, files: Sequence[Outcome], note: str = "") -> str:
    passed, failed = sum(len(each.passed) for each in files), sum(len(each.failed) for each in files)
    skipped, seconds = sum(len(each.skipped) for each in files), sum(each.seconds for each in files)
    return f"| {name} | {passed} | {failed} | {skipped} | {seconds:.0f} | {note} |"


# --- the command ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options. Raises UsageError for combinations that make no sense."""
    parser = arguments.Parser(prog="ci/upstream", description="PyTorch's own distributed tests on our ranks.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tests", type=Path, metavar="DIR", help="test/distributed of a checkout of PyTorch")
    source.add_argument("--archive", type=Path, metavar="FILE", help="a source archive of PyTorch")
    source.add_argument(
        "--debian", nargs="?", const="", metavar="RELEASE", help="Debian's source package, of this release"
    )
    parser.add_argument("--group", default="", metavar="NAMES", help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--file", action="append", default=[], metavar="PATTERN", help="only these files")
    parser.add_argument("--subject", choices=SUBJECTS, default="torch")
    parser.add_argument("--ranks", choices=("auto", *RANKS), default="auto")
    parser.add_argument("--jobs", "-j", type=int, default=1, metavar="N", help="files at a time")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for each file")
    parser.add_argument(
        "--known", type=Path, metavar="FILE", help="failures that are known: runs its files, and anything else fails"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="keep tests.json and table.md in DIR")
    parser.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="only tests that pytest's -k selects")
    parsed = parser.parse_args(argv)
    if parsed.jobs < 1:
        raise UsageError(f"--jobs must be a positive number, got {parsed.jobs}")
    groups = [name for name in parsed.group.split(",") if name]
    unknown = [name for name in groups if name not in GROUPS]
    if unknown:
        raise UsageError(f"--group must be some of {', '.join(GROUPS)}, got {', '.join(unknown)}")
    if parsed.subject == "reference" and groups not in ([], ["fsdp1"]):
        raise UsageError(f"--subject reference is for the group fsdp1, got --group {parsed.group}")
    parsed.groups = groups or (["fsdp1"] if parsed.subject == "reference" else list(GROUPS))
    return parsed


def run(parsed: argparse.Namespace, directory: Path) -> int:
    """Take the tests, run them, print and keep the table. Returns the exit status."""
    listed = upstream_known.load(parsed.known) if parsed.known is not None else upstream_known.NOTHING
    known = listed.tests
    tests = directory / "distributed"
    if parsed.tests is not None:
        copy_tests(parsed.tests, tests)
    elif parsed.archive is not None:
        unpack_tests(parsed.archive, tests)
    else:
        download_tests(tests, parsed.debian or listed.release)
    for path in tests.rglob("test_*.py"):
        path.write_text(prefaced(path.read_text(encoding="utf-8")), encoding="utf-8")
    ranks = parsed.ranks
    if ranks == "auto":
        ranks = "simulated" if knows_simulated_cuda() else "cpu"
    found = files_of(tests, parsed.groups, parsed.file or listed.files)
    if not any(found.values()):
        raise UsageError("no file matches --group and --file")
    outcomes: dict[str, list[Outcome]] = {}
    for group, outcome in run_files(tests, found, listed, ranks=ranks, parsed=parsed):
        outcomes.setdefault(group, []).append(outcome)
        print(_row(outcome.file, [outcome], _note(outcome, known)), flush=True)
    lines = [*table(outcomes, known), "", *notes(parsed.subject, ranks)]
    chosen_files = {file for files in found.values() for file in files}
    lines += [
        f"- not run: {test} of {file}: {why}" for (file, test), why in listed.left_out.items() if file in chosen_files
    ]
    print("\n" + "\n".join(lines))
    if parsed.report is not None:
        keep(parsed.report, lines, outcomes)
    ran = [each for files in outcomes.values() for each in files]
    news = [line for each in ran for line in upstream_known.news(known, each.file, set(each.passed), set(each.failed))]
    if parsed.known is not None:
        print("\n" + "\n".join(news or [f"As {parsed.known} says."]))
    return int(any(each.broken for each in ran) or bool(parsed.known is not None and news))


def run_files(
    tests: Path,
    found: Mapping[str, Sequence[str]],
    listed: upstream_known.KnownFailures,
    *,
    ranks: str,
    parsed: argparse.Namespace,
) -> Iterator[tuple[str, Outcome]]:
    """
    Run the files of each group, `--jobs` of them at a time, and yield group and outcome in the order of `found`.

    No process is left, however this ends. Raises Stopped once a signal has come and all tests have ended.
    """
    keyword = ["-k", parsed.keyword] if parsed.keyword else []
    with caught() as signals, ThreadPoolExecutor(parsed.jobs) as pool:
        left = False
        running = [
            (
                group,
                pool.submit(
                    run_file, tests, file, subject=parsed.subject, ranks=ranks, limit_s=parsed.limit,
                    options=[*keyword, *left_out(listed, file)], stopped=lambda: left or bool(signals),
                ),
            )
            for group, files in found.items()
            for file in files
        ]  # fmt: skip
        try:
            for group, future in running:
                outcome = future.result()
                if signals:
                    break
                yield group, outcome
        finally:
            left = True
            pool.shutdown(cancel_futures=True)
    if signals:
        raise Stopped(signals[0])


def left_out(listed: upstream_known.KnownFailures, file: str) -> Iterable[str]:
    """Options of pytest that leave out the tests of a file that the list leaves out."""
    for listed_file, test in listed.left_out:
        if listed_file == file:
            yield f"--deselect={Path(file).name}::{test.replace('.', '::')}"


def notes(subject: str, ranks: str) -> list[str]:
    """What was adapted, so that the figures can be read."""
    found = [line for name in (ranks, subject) for line in ADAPTATIONS.get(name, ())]
    return [f"Subject: {subject}. Ranks: {ranks}.", *(f"- {line}" for line in found)]


def keep(report: Path, lines: Sequence[str], outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Write the table and everything behind it."""
    report.mkdir(parents=True, exist_ok=True)
    (report / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    plain = {group: [asdict(each) for each in files] for group, files in outcomes.items()}
    (report / "tests.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    with raised(), tempfile.TemporaryDirectory(prefix="fsdp-conformance-") as directory:
        try:
            return run(parse(argv), Path(directory))
        except ConformanceError as error:
            complain(error)
            return int(error.exit_status)
        except KeyboardInterrupt as error:
            return 128 + (error.signum if isinstance(error, Stopped) else signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
