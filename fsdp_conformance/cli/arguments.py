"""The command line of `fsdp-conformance`: commands, options, and the settings that they make."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import fsdp_conformance
from fsdp_conformance import run_settings, status
from fsdp_conformance.cli import messages
from fsdp_conformance.contract.profile import INTERPRETATION
from fsdp_conformance.diagnosis.severity import Severity
from fsdp_conformance.errors import UsageError
from fsdp_conformance.report.expectations import NAME as EXPECTATIONS
from fsdp_conformance.report.formats import FORMATS
from fsdp_conformance.report.last_run import with_last_failed
from fsdp_conformance.run_settings import OPTIONS, Kind, RunSettings
from fsdp_conformance.suggestions import as_id, is_id

SHELLS = ("bash", "zsh", "tcsh")

#: The options that decide which cases run, and where: those of `run` and `list`.
_OF_CASES = [option.name for option in OPTIONS.values() if option.kind is not Kind.RUN]

_INIT_NOTES = """\
Writes the adapter with a `wrap` to fill in, tests/test_conformance.py, conformance.toml and
.github/workflows/conformance.yml. If one of them exists, nothing is written.

"""

_SANITIZE_NOTES = """\
The script is started as torchrun would start it, once for each rank. It should use the device "sim" or the device of
torch.accelerator; with --as-cuda it may also use "cuda" and "nccl". It needs a C++ compiler, but no GPU.

"""

_RECORD_NOTES = """\
The command may be torchrun, a script that starts its ranks itself, or anything else that starts this environment's
Python. The script is not edited, and recording does not change what it computes. Each rank writes one file. To compare
two recordings, on any machine: fsdp-conformance parity DIR REFERENCE_DIR.

"""

_PARITY_NOTES = """\
The script runs as torchrun would run it, and then once more with its sharding taken out: fully_shard and
FullyShardedDataParallel replicate the model instead. A script that resumes from its own checkpoints needs a separate
directory for each run: write {run} in an argument, and it is replaced by the run's name.

"""

_PLAN_NOTES = """\
SPEC is a function that returns a module and a tuple with the inputs of one rank's forward; the model is built on the
meta device. A link is a name (nvlink, pcie, ib, ethernet, gloo-loopback) or LAUNCH_US:LATENCY_US:GB_PER_S. No rank is
started.

"""

_EXPLORE_NOTES = """\
Only features that the implementation declares are drawn. Examples run on simulated ranks, and each failure is confirmed
on processes.

"""

_COMPLETION_NOTES = """\
It needs shtab: pip install shtab.

  bash   eval "$(fsdp-conformance completion bash)", in ~/.bashrc
  zsh    fsdp-conformance completion zsh >DIR/_fsdp-conformance, where DIR is in $fpath
  tcsh   fsdp-conformance completion tcsh >FILE, and `source FILE` in ~/.tcshrc

"""

_SELECTION_NOTES = """\
Selection options combine: values of one option add up (--chapter A,G selects both chapters), and different options
narrow the selection down (--chapter A --world-size 2 selects what satisfies both). All of them take comma-separated
lists and can be repeated. A selection that is smaller than the profile cannot certify.

"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors suggest what was probably meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # `--dev` for --device would break when another option begins with the same letters.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        words = re.findall(r"unrecognized arguments: (\S+)|invalid choice: '([^']*)'", message)
        wrong = next((word for pair in words for word in pair if word), "").partition("=")[0]
        hint = "" if message.endswith(".") else (messages.did_you_mean(wrong, self._words()) if wrong else "") or "."
        print(f"{self.prog}: {message}{hint} See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(int(status.Status.USAGE))

    def _words(self) -> list[str]:
        words = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                words += list(action.choices)
        return words


def parser() -> Parser:
    """The whole command line, for what reads it: help, completion."""
    return _parser()[0]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """
    The arguments; `module` is the module of this package that has the command.

    Raises SystemExit with status 2 for what cannot be parsed.
    """
    whole, commands = _parser()
    words = sys.argv[1:] if argv is None else list(argv)
    parsed, rest = whole.parse_known_args(words)
    if rest:
        # Argparse would report them for the whole program; the command's own parser knows the options that are near.
        hint = _where_it_belongs(rest[0], words, parsed.command, commands)
        commands[parsed.command].error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return parsed


def _where_it_belongs(word: str, words: Sequence[str], command: str, commands: Mapping[str, Parser]) -> str:
    """A sentence about an argument that a command does not take, if others do, or if it is one more value of a list."""
    option = word.partition("=")[0]
    if option.startswith("-"):
        takers = [name for name, each in commands.items() if option in each._option_string_actions]
        names = f"{takers[0]} and other commands" if len(takers) > 3 else " and ".join(takers)
        return f". {option} is an option of {names}, not of {command}." if takers else ""
    before = list(itertools.takewhile(lambda each: each != word, words))
    last = next((each for each in reversed(before) if each.startswith("--")), "")
    if any(each.flag == last and each.is_list for each in OPTIONS.values()):
        values = list(itertools.takewhile(lambda each: not each.startswith("-"), words[words.index(last) + 1 :]))
        return f". Separate the values of {last} by commas: {last} {','.join(values)}."
    return ""


def named_implementation(parsed: argparse.Namespace) -> str | None:
    """
    The implementation that a command was given, with or without --implementation; None for none.

    Raises UsageError for two different ones, and for the id of a case, which has lost its option.
    """
    with_option: str | None = parsed.implementation
    without: str | None = parsed.spec
    if without and is_id(without):
        raise UsageError(
            f"the implementation cannot be {without}, which is a requirement or a case: select it with --case, and "
            f"separate several by commas, such as --case R003,{as_id(without)}"
        )
    if None not in (without, with_option) and without != with_option:
        raise UsageError(
            f"{parsed.command} takes one implementation, got {without} and --implementation {with_option}: "
            "name only one"
        )
    return without or with_option


def settings_of(parsed: argparse.Namespace) -> RunSettings:
    """
    The settings that a command's options make; those that the command does not have keep their defaults.

    Raises ConfigError with every problem found, and UsageError if --last-failed has nothing to run.
    """
    settings = run_settings.from_words(**{name: getattr(parsed, name, None) for name in OPTIONS})
    return with_last_failed(settings) if getattr(parsed, "last_failed", False) else settings


def selection_words(settings: RunSettings) -> list[str]:
    """The options that make another command look at the same cases on the same device, as a shell takes them."""
    options = [OPTIONS[name] for name in _OF_CASES if name != "implementation"]
    return [shlex.quote(word) for option in options for word in option.words(settings)]


def _parser() -> tuple[Parser, dict[str, Parser]]:
    whole = Parser(
        prog=messages.PROGRAM,
        description="The conformance suite for sharded data-parallel training in PyTorch.",
        epilog=status.table(),
    )
    version = f"{messages.PROGRAM} {fsdp_conformance.__version__}, interpretation {INTERPRETATION}"
    whole.add_argument("--version", action="version", version=version)
    subparsers = whole.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands: dict[str, Parser] = {}

    def command(name: str, summary: str, *, module: str | None = None, notes: str = "") -> Parser:
        commands[name] = subparsers.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=notes + status.table(name)
        )
        commands[name].set_defaults(module=module or name)
        return commands[name]

    _add_run(command("run", "train an implementation next to the reference, and judge it", notes=_SELECTION_NOTES))

    init = command("init", "write an adapter to fill in, tests and a workflow into a repository", notes=_INIT_NOTES)
    init.add_argument("directory", nargs="?", metavar="DIR", default=".", help="the repository's root (default: .)")
    init.add_argument(
        "--adapter", metavar="SPEC", required=True, help="what to write: package.module:Class or path/to/file.py:Class"
    )
    init.add_argument("--force", action="store_true", help="overwrite files that exist")

    smoke = command("smoke", "check the adapter by itself, and report all of its problems at once")
    spec = OPTIONS["implementation"].help
    smoke.add_argument("spec", nargs="?", metavar="IMPLEMENTATION", help=f"same as --implementation: {spec}")
    _add_options(smoke, "implementation", default=None, help=spec)
    _add_options(smoke, "device")
    _add_json(smoke, "the checks and their problems")

    _add_sanitize(
        command(
            "sanitize", "look for races, mismatched collectives and uninitialized memory in a training script",
            notes=_SANITIZE_NOTES,
        )
    )  # fmt: skip

    _add_record(command("record", "run a command, and record what its processes train", notes=_RECORD_NOTES))
    _add_parity(
        command("parity", "find where sharded training first differs from unsharded training", notes=_PARITY_NOTES)
    )

    doctor = command("doctor", "check what this machine can and cannot run")
    _add_options(doctor, "device")
    _add_options(doctor, "share_devices", help="check what `run --share-devices` can run here, and how")
    _add_json(doctor, "the findings")

    _add_plan(command("plan", "price every way to shard a model, and choose the fastest that fits", notes=_PLAN_NOTES))

    _add_selftest(command("selftest", "show that known-wrong engines are killed here, and correct ones are not"))

    _add_explore(
        command("explore", "draw models, configurations and schedules, and shrink what fails", notes=_EXPLORE_NOTES)
    )

    listing = command(
        "list", "list the cases and whether they would run, without starting ranks",
        module="listing", notes=_SELECTION_NOTES,
    )  # fmt: skip
    _add_options(listing, *_OF_CASES)
    listing.add_argument("--why", action="store_true", help="show what each case expects, or why it would not run")
    listing.add_argument("--not-run", action="store_true", help="show only cases that would not run, with the reason")
    others = listing.add_mutually_exclusive_group()
    others.add_argument(
        "--requirements",
        dest="list_requirements",
        action="store_true",
        help="list the requirements and how many cases each has",
    )
    others.add_argument(
        "--capabilities", action="store_true", dest="list_capabilities", help="list the capability flags"
    )
    _add_json(listing, "the list")

    _add_single_cases(command)
    _add_readers(command)
    completion = command("completion", "print a script that completes this command in a shell", notes=_COMPLETION_NOTES)
    completion.add_argument("shell", choices=SHELLS, help="the shell: " + ", ".join(SHELLS))
    return whole, commands


#: The options that decide what the ranks of one case do, in the order of `repro` lines.
_OF_ONE_CASE = (
    "implementation", "profile", "workload", "device", "backend", "share_devices", "stress", "stress_seed",
    "stress_failure", "fresh_seed",
)  # fmt: skip


def _add_single_cases(command: Callable[..., Parser]) -> None:
    """The commands that look at one case."""
    debug = command("debug", "run one case with one rank in the foreground, for breakpoint() and pdb")
    debug.add_argument("case", metavar="CASE", type=as_id, help="the id of a case, such as R001/exact-probe-ws2")
    _add_options(debug, *_OF_ONE_CASE)
    debug.add_argument("--rank", metavar="N", default="0", help="the rank that has the terminal (default: 0)")
    debug.add_argument(
        "--pdb", action="store_true", help="open pdb where this rank raises an exception that the case does not expect"
    )

    replay = command("replay", "repeat a case of a run, and compare the verdicts")
    replay.usage = "%(prog)s [options] [RUN] CASE"
    replay.add_argument(
        "words",
        nargs="+",
        metavar="[RUN] CASE",
        type=as_id,
        help="a run file or its directory (default: the last run), and a case",
    )
    repro = command("repro", "write a case as a script for torchrun that does not need this package, for a bug report")
    repro.add_argument(
        "case", metavar="CASE", type=as_id, help="the id of a case that trains an exact workload and compares it"
    )
    _add_options(repro, "implementation")
    repro.add_argument("-o", "--output", metavar="FILE", help="write to this file (default: to stdout)")

    replay.add_argument("--times", metavar="N", default="1", help="how many times (default: 1)")
    _add_options(
        replay,
        "implementation",
        default=None,
        help="the implementation (default: the run's, if it was an installed name and not a file or a module)",
    )
    _add_options(replay, "workload", help="the model, batches and loss; must be given again if the run had --workload")


def _add_readers(command: Callable[..., Parser]) -> None:
    """The commands that read run files."""
    explain = command("explain", "explain a requirement or a case, and what the last run found")
    explain.add_argument("name", metavar="ID", type=as_id, help="a requirement (R003) or a case (R001/exact-probe-ws2)")
    explain.add_argument("--report", metavar="PATH", help="a run file or its directory (default: the last run)")
    _add_profile_of_run(explain)
    _add_json(explain, "requirement, cases and records")

    verify = command("verify", "derive the verdict of a run again, from its run file alone")
    verify.add_argument("run_file", metavar="PATH", help="a run file, or its directory")
    printed = verify.add_mutually_exclusive_group()
    printed.add_argument("--markdown", action="store_true", help="print a summary in Markdown instead")
    _add_json(printed, "the certificate")
    verify.add_argument("--html", metavar="FILE", help="also write the run as one HTML page")
    verify.add_argument("--key", metavar="FILE", help="check the signature, too, with this public Ed25519 key (PEM)")
    _add_profile_of_run(verify)
    _add_expected(verify)

    board = command("scoreboard", "show the runs of several engines side by side, requirement by requirement")
    board.add_argument("run_files", nargs="+", metavar="RUN", help="a run file, or its directory")
    board.add_argument("--all", action="store_true", help="also show requirements that every engine passes")
    board.add_argument(
        "--coverage",
        action="store_true",
        help="show the whole contract instead: the cases of each requirement, and their results in every run",
    )
    _add_json(board, "the table")
    _add_profile_of_run(board)

    update = command(
        "update-expectations", "write the failures of a run into conformance.toml", module="update_expectations"
    )
    update.add_argument(
        "run_file", nargs="?", metavar="RUN", help="a run file or its directory (default: the last run)"
    )
    update.add_argument(
        "--file", metavar="FILE", default=EXPECTATIONS, help=f"the list to update (default: {EXPECTATIONS})"
    )
    _add_profile_of_run(update)

    compare = command("compare", "show which verdicts differ between two runs")
    compare.add_argument("old", metavar="OLD", help="a run file, or its directory")
    compare.add_argument("new", metavar="NEW", help="another one")
    _add_json(compare, "the comparison")
    compare.add_argument("--force", action="store_true", help="compare different implementations or devices, too")

    trend = command("trend", "show when cases began to fail and which became slower, across stored runs")
    trend.add_argument(
        "directory", metavar="DIR", help="the directory with the run files, in subdirectories of any depth"
    )
    _add_json(trend, "the trends")
    trend.add_argument("--annotations", action="store_true", help="print only GitHub annotations of new failures")

    export = command("export", "print a run in a format that other programs read")
    export.add_argument("run_file", metavar="RUN", help="a run file, or its directory")
    export.add_argument("--format", choices=FORMATS, required=True, help="what to write: " + ", ".join(FORMATS))
    export.add_argument("--case", action="append", metavar="GLOB", help="only these cases; may be repeated")
    export.add_argument("-o", "--output", metavar="FILE", help="write to this file (default: to stdout)")
    _add_profile_of_run(export)
    known = export.add_mutually_exclusive_group()
    known.add_argument(
        "--expectations",
        metavar="FILE",
        help=f"mark the failures in this list as known (default: {EXPECTATIONS}, if it exists)",
    )
    known.add_argument("--no-expectations", action="store_true", help=f"ignore {EXPECTATIONS} in this directory")
    export.set_defaults(baseline=None, fail_on=None)


def _add_run(parser: Parser) -> None:
    spec = OPTIONS["implementation"].help
    parser.add_argument("spec", nargs="?", metavar="IMPLEMENTATION", help=f"same as --implementation: {spec}")
    # Without a default, to tell whether it was given.
    _add_options(parser, "implementation", default=None)
    _add_options(parser, *(name for name in OPTIONS if name != "implementation"))
    parser.add_argument(
        "--no-smoke", dest="smoke", action="store_false", help="run the cases even if the adapter check fails"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue an interrupted run in its run file, with its options (default: the last run)",
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report, one HTML page, to this file")
    parser.add_argument("--sign", metavar="KEY", help="sign the run file with this private Ed25519 key (PEM)")
    group = _add_expected(parser)
    group.add_argument("--no-expectations", action="store_true", help=f"ignore {EXPECTATIONS} in this directory")
    _add_workers(parser, "number of pytest workers; `auto` fits the available devices")
    _add_suites(parser, default=None)


def _add_expected(parser: Parser) -> argparse._MutuallyExclusiveGroup:
    """Options for comparing a run with more than the contract. Returns the group of those about expectations."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--expectations",
        metavar="FILE",
        help="a list of known failures: exit with 0 if the run is exactly as expected, else with 1"
        + (f" (default: {EXPECTATIONS}, if it exists)" if parser.prog.endswith(" run") else ""),
    )
    parser.add_argument(
        "--baseline",
        metavar="RUN",
        help="compare with an earlier run: report what is new, fixed, unchanged or missing; exit with 1 only if "
        "something is new or missing",
    )
    parser.add_argument(
        "--fail-on",
        metavar="SEVERITIES",
        help="exit with 1 only for failures that are not known and do one of these kinds of harm, separated by commas: "
        + ", ".join(f"{severity} ({severity.words})" for severity in Severity),
    )
    return group


def _add_options(parser: Parser, *names: str, **changes: Any) -> None:
    """Add options of the table; `changes` replace the arguments of `add_argument` that the table gives."""
    selection: argparse._ActionsContainer | None = None
    for option in (OPTIONS[name] for name in names):
        if option.kind is Kind.SELECTION:
            selection = selection or parser.add_argument_group("selection")
        keywords: dict[str, Any] = {"dest": option.name, "help": option.help}
        if option.default:
            keywords["help"] += f" (default: {option.default})"
        if not option.metavar:
            keywords["action"] = "store_true"
        elif option.is_list:
            keywords |= {"action": "append", "metavar": option.metavar}
        else:
            # A default that is a word is what commands without settings read.
            default = getattr(run_settings.DEFAULTS, option.target)
            keywords |= {"metavar": option.metavar, "choices": option.choices or None}
            keywords["default"] = default if default and isinstance(default, str) else None
        place = selection if selection is not None and option.kind is Kind.SELECTION else parser
        place.add_argument(option.flag, **(keywords | changes))


def _add_sanitize(parser: Parser) -> None:
    parser.usage = "%(prog)s [options] (SCRIPT | -m MODULE) [argument ...]"
    parser.add_argument("--world-size", metavar="N", default="2", help="number of ranks (default: 2)")
    parser.add_argument(
        "--device",
        choices=("simulated", "cuda"),
        default="simulated",
        help="the simulated accelerator, or the GPUs of this machine, traced with torch's hooks (default: simulated)",
    )
    parser.add_argument(
        "--devices",
        metavar="N",
        help="number of devices, for a script that is started once and starts its ranks itself (default: one for each "
        "rank)",
    )
    parser.add_argument(
        "--mode",
        choices=("record", "raise", "poison"),
        default="record",
        help="what to do about a hazard: record it, raise where it happens, or fill its result with NaN "
        "(default: record)",
    )
    parser.add_argument(
        "--as-cuda", action="store_true", help='let "cuda" in the script mean the simulated accelerator'
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="the memory of each device, such as 80GiB: beyond it torch.cuda.OutOfMemoryError is raised "
        "(default: no limit)",
    )
    parser.add_argument(
        "--reuse",
        choices=("exact", "worst-case"),
        default="exact",
        help="which memory a new tensor may reuse: exact is the block that it gets in this run, worst-case is "
        "any freed block that a caching allocator could choose, which finds tensors that are freed too early "
        "(default: exact)",
    )
    parser.add_argument(
        "--ignore-implicit-syncs",
        action="store_true",
        help="also report accesses that are ordered only because the host waits for a value: item(), nonzero, a "
        "blocking copy",
    )
    parser.add_argument(
        "--ordering-only",
        action="store_true",
        help="compute each kind of operation once, and skip later ones whose results are only numbers: races do not "
        "depend on them, and large models take a fraction of the time",
    )
    parser.add_argument(
        "--suppressions",
        metavar="FILE",
        help="a file of known findings, which are listed but do not change the exit status: one KIND:PATTERN a line, "
        "where PATTERN is a glob for the function or the file of any frame",
    )
    parser.add_argument(
        "--strict-suppressions", action="store_true", help="exit with 1 if a line of --suppressions matches nothing"
    )
    parser.add_argument(
        "--rank",
        metavar="N",
        help="give this rank the terminal, so that breakpoint() works in it; the other ranks skip breakpoints, and "
        "there is no time limit",
    )
    parser.add_argument("--timeout", metavar="S", default="600", help="end the ranks after S seconds (default: 600)")
    parser.add_argument("--json", metavar="FILE", help="also write the findings to a file")
    parser.add_argument("--sarif", metavar="FILE", help="also write them as code-scanning alerts (SARIF)")
    _add_script(parser)


def _add_script(parser: Parser) -> None:
    parser.add_argument(
        "-m",
        dest="module_words",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        help="run a module, like python -m; all that follows is passed to it",
    )
    parser.add_argument(
        "script_words", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script; all that follows is passed to it"
    )


def _add_record(parser: Parser) -> None:
    parser.usage = "%(prog)s --output DIR [--as-cuda N] [--timeout S] -- COMMAND [argument ...]"
    parser.add_argument("--output", metavar="DIR", required=True, help="a new directory for the recording")
    parser.add_argument(
        "--as-cuda", metavar="N", help='let "cuda" in the command mean one of N simulated GPUs: no GPU is needed'
    )
    parser.add_argument(
        "--timeout", metavar="S", default="86400", help="end the command after S seconds (default: a day)"
    )
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command, with its arguments")


def _add_parity(parser: Parser) -> None:
    parser.usage = (
        "%(prog)s [options] (SCRIPT | -m MODULE) [argument ...]\n       %(prog)s RECORDING REFERENCE_RECORDING"
    )
    parser.add_argument("--world-size", metavar="N", default="2", help="number of ranks (default: 2)")
    parser.add_argument(
        "--as-cuda", action="store_true", help='let "cuda" in the scripts mean simulated GPUs: no GPU is needed'
    )
    parser.add_argument(
        "--reference",
        metavar="SCRIPT",
        help="the training to compare with: a script with its arguments, a recording, or one-process, which trains the "
        "ranks' samples as one batch (default: the script with its sharding taken out)",
    )
    parser.add_argument(
        "--reference-world-size", metavar="N", help="number of ranks of the reference (default: as many as the run)"
    )
    parser.add_argument("--output", metavar="DIR", help="keep the recordings in a new directory, with report.html")
    parser.add_argument("--html", metavar="FILE", default="", help="also write the comparison as an HTML page")
    parser.add_argument(
        "--nudged",
        metavar="DIR",
        help="with two recordings: a third one, of the reference with nudged parameters, to measure rounding",
    )
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="show collectives that differ even if nothing else does; needs two runs that are sharded alike",
    )
    parser.add_argument(
        "--no-values",
        action="store_true",
        help="skip the second pass, which runs both up to the first difference and compares its tensors by element",
    )
    parser.add_argument("--timeout", metavar="S", default="600", help="end each run after S seconds (default: 600)")
    parser.add_argument(
        "--strict-suspicions", action="store_true", help="exit with 1 for suspicions, too (marked with ?)"
    )
    _add_script(parser)


def _add_explore(parser: Parser) -> None:
    _add_options(parser, "implementation")
    _add_options(parser, "workload", help="draw engines, trainings and events for your own model, batches and loss")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--seconds", metavar="S", help="draw for S seconds (default: 600)")
    budget.add_argument("--max-examples", metavar="N", help="draw N examples instead")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", metavar="N", help="draw the examples from seed N (default: a new seed each time)")
    seeds.add_argument("--derandomize", action="store_true", help="draw the same examples every time, for CI")
    _add_options(parser, "world_sizes", help="only these numbers of ranks")
    parser.add_argument("--save", metavar="DIR", help="write each failure as a test file for pytest into DIR")
    parser.add_argument("--script", action="store_true", help="print a script for each failure")
    _add_json(parser, "the failures, with their scripts, and the counts")
    _add_options(parser, "deadline_scale", "device")


def _add_selftest(parser: Parser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="run only one known-wrong engine of each class; takes two minutes"
    )
    _add_json(parser, "the result")
    _add_workers(parser, "number of workers; `auto`, the default, fits the cores")
    _add_suites(parser)


def _add_workers(parser: Parser, text: str) -> None:
    parser.add_argument("-n", dest="workers", metavar="N", type=_workers, help=text)


def _add_suites(parser: Parser, default: str | None = "fsdp_conformance.suites") -> None:
    """For tests of a command."""
    parser.add_argument("--suites", metavar="PACKAGE", default=default, help=argparse.SUPPRESS)


def _add_plan(parser: Parser) -> None:
    parser.add_argument("--model", metavar="SPEC", required=True, help="package.module:function or file.py:function")
    parser.add_argument("--world-size", metavar="N", required=True, help="number of ranks")
    parser.add_argument("--ranks-per-host", metavar="N", default="8", help="ranks on each host (default: 8)")
    parser.add_argument(
        "--link",
        metavar="LINKS",
        default="nvlink+ib",
        help="the links within a host + between hosts (default: nvlink+ib)",
    )
    parser.add_argument("--device", metavar="NAME", default="h100", help="a100, h100 or h200 (default: h100)")
    parser.add_argument("--memory", metavar="SIZE", help="memory of each rank, e.g. 80GiB (default: the device's)")
    parser.add_argument(
        "--units", metavar="CLASS", action="append", help="class of modules to wrap (default: members of module lists)"
    )
    parser.add_argument(
        "--compute-dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="dtype of computation, gathers and reductions (default: bfloat16)",
    )
    parser.add_argument(
        "--utilisation", metavar="F", default="0.4", help="fraction of the device's peak that is reached (default: 0.4)"
    )
    parser.add_argument("--rows", metavar="N", default="12", help="number of candidates to show (default: 12)")
    _add_json(parser, "all candidates")


def _add_json(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def _add_profile_of_run(parser: Parser) -> None:
    option = OPTIONS["profile"]
    _add_options(parser, option.name, default=None, help=f"{option.help} (default: that of the run file)")


def _workers(text: str) -> str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of workers or 'auto', got {text!r}")
    return text
