"""What can be typed after `fsdp-conformance`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import fsdp_conformance
from fsdp_conformance import settings
from fsdp_conformance.cli import messages, status
from fsdp_conformance.config import RANKS, RunSettings
from fsdp_conformance.contract.profile import INTERPRETATION

DEFAULTS = RunSettings()

_IMPLEMENTATION = "an entry point's name, package.module:Class, or path/to/file.py:Class"


_SANITIZE_NOTES = """\
The script is started as by torchrun, once per rank. It asks for the device "sim", or for torch.accelerator's; with
--as-cuda it may say "cuda" and "nccl". No GPU is needed, a C++ compiler is.

"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors say what was probably meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # `--dev` for --device would break when another option begins with the same letters.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        words = re.findall(r"unrecognized arguments: (\S+)|invalid choice: '([^']*)'", message)
        wrong = next((word for found in words for word in found if word), "").partition("=")[0]
        hint = messages.did_you_mean(wrong, self._words()) if wrong else ""
        print(f"{self.prog}: {message}.{hint} See {self.prog} --help.", file=sys.stderr)
        raise SystemExit(int(status.Status.USAGE))

    def _words(self) -> list[str]:
        words = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                words += list(action.choices)
        return words


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """
    The arguments; `module` is the module of this package that has the command.

    Raises SystemExit with status 2 for what cannot be parsed.
    """
    parser, commands = _parser()
    parsed, rest = parser.parse_known_args(argv)
    if rest:
        # Argparse would report them for the whole program; the command's own parser knows the options that are near.
        commands[parsed.command].error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def settings_of(parsed: argparse.Namespace) -> RunSettings:
    """
    What a run is asked for, of a command that has these options.

    Raises ConfigError with every problem found.
    """
    return settings.from_words(
        implementation=parsed.implementation,
        profile=parsed.profile,
        device=parsed.device,
        world_sizes=parsed.world_sizes,
        cases=parsed.cases,
        no_simulator=getattr(parsed, "no_simulator", None),
        report_dir=getattr(parsed, "report", None),
        ranks=getattr(parsed, "ranks", None),
        reuse_ranks=getattr(parsed, "reuse_ranks", None),
        deadline_scale=getattr(parsed, "deadline_scale", None),
    )


def settings_of_device(parsed: argparse.Namespace) -> RunSettings:
    """The settings of a command that has --device alone. Raises ConfigError."""
    return settings.from_words(device=parsed.device)


def _parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog=messages.PROGRAM,
        description="The conformance suite for sharded data-parallel training in PyTorch.",
        epilog=status.TABLE,
    )
    version = f"{messages.PROGRAM} {fsdp_conformance.__version__}, interpretation {INTERPRETATION}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands: dict[str, Parser] = {}

    def command(name: str, module: str, summary: str, *, notes: str = "", table: str = status.TABLE) -> Parser:
        commands[name] = subparsers.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=notes + table
        )
        commands[name].set_defaults(module=module)
        return commands[name]

    run = command("run", "run", "train an implementation beside the reference, and judge it")
    _add_implementation(run)
    _add_selection(run)
    run.add_argument("--report", metavar="DIR", help="directory of the run file (default: .fsdp-conformance/NAME-TIME)")
    run.add_argument("-n", dest="workers", metavar="N", type=_workers, help="workers, or auto: as many as devices hold")
    run.add_argument(
        "--ranks",
        choices=RANKS,
        default=DEFAULTS.ranks,
        help="what a rank is: a fresh process, or a thread of one process, quick in large worlds (default: processes)",
    )
    run.add_argument("--reuse-ranks", action="store_true", help="keep ranks across cases: quick, and never certified")
    run.add_argument("--deadline-scale", metavar="F", help="multiplies every deadline, for slow machines")

    run.add_argument("--suites", metavar="PACKAGE", default=None, help=argparse.SUPPRESS)  # for tests of this command

    smoke = command("smoke", "smoke", "judge the adapter alone, and report all of its problems at once")
    smoke.add_argument(
        "spec", nargs="?", metavar="IMPLEMENTATION", help=f"the same as --implementation: {_IMPLEMENTATION}"
    )
    _add_implementation(smoke, default=None)
    _add_device(smoke)

    sanitize = command(
        "sanitize",
        "sanitize",
        "run a training script on the simulated accelerator, and report its races",
        notes=_SANITIZE_NOTES,
        table=status.SANITIZE_TABLE,
    )
    _add_sanitize(sanitize)

    doctor = command("doctor", "doctor", "say what this machine can do, and what it cannot")
    _add_device(doctor)

    listing = command("list", "listing", "show every case and whether it would run, starting no rank")
    _add_implementation(listing)
    _add_selection(listing)
    listing.add_argument("--why", action="store_true", help="say why a case would not run")
    listing.add_argument("--not-run", action="store_true", help="only the cases that would not run, with the reason")
    others = listing.add_mutually_exclusive_group()
    others.add_argument("--requirements", action="store_true", help="the requirements instead, with their cases")
    others.add_argument("--capabilities", action="store_true", help="the capability flags instead")

    explain = command("explain", "explain", "show a requirement or a case, and what a run found of it")
    explain.add_argument("name", metavar="ID", help="a requirement (R003) or a case (R001/exact-probe-ws2)")
    explain.add_argument("--report", metavar="PATH", help="a run file or its directory (default: the last run)")
    _add_profile(explain, default=None)

    verify = command("verify", "verify", "derive the verdict again from a run file, trusting nothing else")
    verify.add_argument("run_file", metavar="PATH", help="a run file, or the directory that it is in")
    verify.add_argument("--markdown", action="store_true", help="print the summary in Markdown instead")
    _add_profile(verify, default=None)
    return parser, commands


def _add_implementation(parser: Parser, default: str | None = DEFAULTS.implementation) -> None:
    shown = f" (default: {default})" if default else ""
    parser.add_argument("--implementation", metavar="SPEC", default=default, help=_IMPLEMENTATION + shown)


def _add_sanitize(parser: Parser) -> None:
    parser.usage = "%(prog)s [options] (SCRIPT | -m MODULE) [argument ...]"
    parser.add_argument("--world-size", metavar="N", default="2", help="number of ranks (default: 2)")
    parser.add_argument(
        "--mode",
        choices=("record", "raise", "poison"),
        default="record",
        help="what a race does: is recorded, raises where it happens, or fills its result with NaN (default: record)",
    )
    parser.add_argument("--as-cuda", action="store_true", help="give a script that says cuda the simulated accelerator")
    parser.add_argument(
        "--timeout", metavar="S", default="600", help="seconds until ranks that have not ended are ended (default: 600)"
    )
    parser.add_argument("--json", metavar="FILE", help="write what was found to a file, too")
    parser.add_argument(
        "-m",
        dest="module_words",
        metavar="MODULE",
        nargs=argparse.REMAINDER,
        help="run a module, as python -m does; what follows its name is its own",
    )
    parser.add_argument(
        "script_words", metavar="SCRIPT", nargs=argparse.REMAINDER, help="the script; what follows is its own"
    )


def _add_device(parser: Parser) -> None:
    parser.add_argument(
        "--device",
        metavar="TYPE",
        default=DEFAULTS.device,
        help=f"cpu, sim (simulated on the CPU), cuda, or any accelerator torch knows (default: {DEFAULTS.device})",
    )


def _add_profile(parser: Parser, default: str | None = DEFAULTS.profile) -> None:
    shown = f"default: {default}" if default else "default: the one that the run file names"
    parser.add_argument("--profile", metavar="NAME", default=default, help=f"name or .json file of a profile ({shown})")


def _add_selection(parser: Parser) -> None:
    _add_profile(parser)
    _add_device(parser)
    parser.add_argument(
        "--no-simulator",
        action="store_true",
        help="on the CPU, leave out the cases that ask for an accelerator instead of simulating one",
    )
    parser.add_argument(
        "--world-size",
        metavar="N",
        dest="world_sizes",
        action="append",
        help="only cases with so many ranks; several by commas, or by repeating the option",
    )
    parser.add_argument(
        "--case",
        metavar="ID",
        dest="cases",
        action="append",
        help="only this case, or the cases of this requirement; may be repeated",
    )


def _workers(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}, but should be a positive number, or auto")
    return text
