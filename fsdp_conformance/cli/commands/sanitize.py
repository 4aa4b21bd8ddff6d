"""
`fsdp-conformance sanitize`: runs a training script on the simulated accelerator, or on GPUs, under the race checker.

Wrong arguments are reported before anything is started. Then the script runs on every rank (`simulator.launch`), its
output is passed on line by line, and the ranks' findings are merged: a hazard that several ranks have is reported once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_conformance import __version__
from fsdp_conformance.cli import alerts, messages
from fsdp_conformance.errors import ConfigError, EnvironmentUnavailable, UsageError
from fsdp_conformance.script_ranks.endings import script_end
from fsdp_conformance.script_ranks.launch import ScriptLaunch
from fsdp_conformance.simulator.sanitize.alerts import alerts_of
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.simulator.sanitize.report import ScriptReport
from fsdp_conformance.simulator.suppressions import NO_SUPPRESSIONS, Suppressions

MODES = ("record", "raise", "poison")

#: A size in bytes: "80GiB", "512 MB", "1.5g". Without "i" the units are powers of 1000, as usual.
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}

#: Seconds that a script may take of which one rank is debugged.
_DEBUGGED_S = 3 * 86400.0

#: More processes than this on one machine are a typing error.
_MAX_RANKS = 127


def main(arguments: argparse.Namespace) -> int:
    """Run the script and print what was found. Returns the exit status."""
    order = order_of(arguments)
    output = Path(arguments.json) if arguments.json else None
    sarif = Path(arguments.sarif) if arguments.sarif else None
    _check(order, {"--json": output, "--sarif": sarif})
    if order.on_gpus:
        _check_gpus(order.world_size)
    from fsdp_conformance.harness.processes.foreground import passing_on_interrupts
    from fsdp_conformance.simulator.device import build
    from fsdp_conformance.simulator.sanitize.rank_children import RankChildren

    reason = build.unavailable()
    if reason:
        raise EnvironmentUnavailable(reason)
    terminal = Terminal()
    terminal.say(_announcement(order))
    began = time.monotonic()
    reports: Sequence[Any] = ()
    exits: Sequence[Any] = ()
    interrupted: KeyboardInterrupt | None = None
    children: RankChildren | None = None
    with ScriptLaunch(order, terminal.pass_on) as launch:
        try:
            # The warm process imports torch meanwhile.
            if not build.is_built():
                terminal.say("compiling the simulated accelerator: about half a minute, once ...")
            extension = {build.EXTENSION: str(build.require())}
            if order.on_gpus:
                launch.start()
            else:
                children = RankChildren(order, run_id=launch.run_id, directory=launch.directory)
                launch.start(children.told(extension), before_files_go=children.look)
            with passing_on_interrupts(launch.pid) if order.foreground is not None else contextlib.nullcontext():
                reports, exits = launch.wait()
        except KeyboardInterrupt as error:
            interrupted = error
    report = ScriptReport(
        order,
        observed=launch.observed,
        end=script_end(reports, exits),
        seconds=time.monotonic() - began,
        calls=launch.calls,
        children=children.observed if children is not None else (),
        interrupted=interrupted is not None,
    )
    for text, style in report.paragraphs():
        terminal.say(text, style)
    if output is not None:
        output.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    report_alerts = alerts_of(report)
    if sarif is not None:
        sarif.write_text(alerts.sarif(report_alerts, report), encoding="utf-8")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in alerts.workflow_commands(report_alerts):
            terminal.say(line)
    if interrupted is not None:
        raise interrupted
    return int(report.status)


def order_of(arguments: argparse.Namespace) -> ScriptOrder:
    """The script to run. Raises ConfigError with every problem found."""
    problems: list[str] = []
    words = arguments.module_words if arguments.module_words is not None else arguments.script_words
    if not words:
        problems.append("give the path of a script, or -m and the name of a module")
    elif arguments.module_words is not None and arguments.script_words:
        problems.append(f"give either a script or -m, got {arguments.script_words[0]!r} and -m {words[0]}")
    world_size = _number(arguments.world_size, "--world-size", int, problems)
    if not 1 <= world_size <= _MAX_RANKS:
        problems.append(f"--world-size must be from 1 to {_MAX_RANKS}, got {world_size}")
    devices = None if arguments.devices is None else _number(arguments.devices, "--devices", int, problems)
    if devices is not None and not world_size <= devices <= _MAX_RANKS:
        problems.append(f"--devices must be from {world_size}, one for each rank, to {_MAX_RANKS}, got {devices}")
    timeout_s = _number(arguments.timeout, "--timeout", float, problems)
    if not 0 < timeout_s < float("inf"):
        problems.append(f"--timeout must be a positive number of seconds, got {arguments.timeout}")
    foreground = None if arguments.rank is None else _number(arguments.rank, "--rank", int, problems)
    if foreground is not None and not 0 <= foreground < world_size:
        problems.append(f"--rank must be a rank, from 0 to {world_size - 1}, got {foreground}")
    memory = _bytes(arguments.memory, problems) if arguments.memory is not None else None
    if arguments.ordering_only and arguments.mode == "poison":
        problems.append("give either --ordering-only or --mode poison: NaN cannot spread where nothing is computed")
    if arguments.suppressions is not None and arguments.mode != "record":
        problems.append(
            f"give either --suppressions or --mode {arguments.mode}: ranks do not know which findings are suppressed"
        )
    on_gpus = arguments.device == "cuda"
    if on_gpus:
        problems += [f"give either --device cuda or {name}: {why}" for name, why in _only_simulated(arguments)]
    if arguments.strict_suppressions and arguments.suppressions is None:
        problems.append("--strict-suppressions needs --suppressions FILE")
    if problems:
        raise ConfigError(problems, where="sanitize")
    suppressions = NO_SUPPRESSIONS if arguments.suppressions is None else Suppressions.read(arguments.suppressions)
    return ScriptOrder(
        target=words[0],
        is_module=arguments.module_words is not None,
        arguments=tuple(words[1:]),
        world_size=world_size,
        mode=arguments.mode,
        as_cuda=arguments.as_cuda,
        on_gpus=on_gpus,
        timeout_s=timeout_s if foreground is None else _DEBUGGED_S,
        foreground=foreground,
        reuse=arguments.reuse.replace("-", "_"),
        waits="explicit" if arguments.ignore_implicit_syncs else "all",
        ordering_only=arguments.ordering_only,
        memory=memory,
        devices=devices,
        suppressions=suppressions,
        strict_suppressions=arguments.strict_suppressions,
    )


def _only_simulated(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The options that were given although a GPU does not have them, each with the reason."""
    hooks_do_not = "torch's hooks do not say how large memory is when it is allocated"
    options = (
        ("--as-cuda", arguments.as_cuda, "'cuda' already means the GPUs of this machine"),
        ("--devices", arguments.devices is not None, "processes that the script starts are not traced"),
        ("--mode poison", arguments.mode == "poison", "results on a GPU are never changed"),
        ("--memory", arguments.memory is not None, "a real GPU has a fixed amount of memory"),
        ("--reuse worst-case", arguments.reuse == "worst-case", hooks_do_not),
        ("--ordering-only", arguments.ordering_only, "on a GPU, every operation is computed"),
    )
    return [(name, why) for name, is_given, why in options if is_given]


def _check_gpus(world_size: int) -> None:
    """Raises EnvironmentUnavailable if torch does not see a GPU for each rank."""
    from fsdp_conformance.harness.devices import device_count

    present = device_count("cuda")
    if not present:
        raise EnvironmentUnavailable(
            "--device cuda needs a GPU, and torch sees none on this machine. To simulate one, leave out --device, and "
            "pass --as-cuda if the script says 'cuda'."
        )
    if present < world_size:
        raise EnvironmentUnavailable(
            f"--world-size {world_size} needs {messages.plural(world_size, 'GPU')}, one for each rank, but torch sees "
            f"{present}. Choose a smaller --world-size, or leave out --device to simulate them."
        )


def _check(order: ScriptOrder, outputs: Mapping[str, Path | None]) -> None:
    """Raises UsageError for a script that cannot be run, and a file that cannot be written."""
    if order.is_module:
        # Check only the first name: finding a submodule would import its package.
        top = order.target.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"Python finds no module {order.target!r} from this directory")
    elif not Path(order.target).exists():
        raise UsageError(messages.no_script(order.target))
    for option, output in outputs.items():
        if output is not None:
            if not output.absolute().parent.is_dir():
                raise UsageError(f"{option} must be a file in an existing directory, got {str(output)!r}")
            output.touch()


def _bytes(word: str, problems: list[str]) -> int:
    """The number of bytes in "80GiB"."""
    match = _SIZE.fullmatch(word.strip())
    if match is None or float(match[1]) == 0:
        problems.append(f"--memory must be a positive size such as 80GiB, got {word!r}")
        return 1
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS.get((match[2] or "").lower(), 0))


def _number(word: str, name: str, kind: type, problems: list[str]) -> Any:
    try:
        return kind(word)
    except ValueError:
        problems.append(f"{name} must be {'an integer' if kind is int else 'a number'}, got {word!r}")
        return 1


def _announcement(order: ScriptOrder) -> str:
    script = f"-m {order.target}" if order.is_module else order.target
    parts = [f"{messages.PROGRAM} {__version__}", f"sanitize {script}", messages.plural(order.world_size, "rank")]
    parts += [f"mode {order.mode}"] + (["cuda simulated"] if order.as_cuda else [])
    parts += ["on GPUs"] if order.on_gpus else []
    if order.num_devices != order.world_size:
        parts.append(messages.plural(order.num_devices, "device"))
    if order.foreground is not None:
        parts.append(f"rank {order.foreground} has the terminal")
    if order.memory is not None:
        parts.append(f"{order.memory / 2**30:.4g} GiB per device")
    if order.reuse != "exact":
        parts.append("worst-case reuse of memory")
    if order.waits != "all":
        parts.append("implicit syncs ignored")
    if order.ordering_only:
        parts.append("ordering only")
    return " · ".join(parts)


class Terminal:
    """Prints lines to stdout, in colour if that is a terminal. The script's lines come from separate threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._console: Any = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        """Print a paragraph of the report."""
        with self._lock:
            if self._console is None:
                print(text, flush=True)
            else:
                self._console.print(text, style=style or None, markup=False)

    def pass_on(self, rank: int, line: str) -> None:
        """Print a line of the script's output."""
        with self._lock:
            if self._console is None:
                print(f"[rank {rank}] {line}", flush=True)
            else:
                from rich.text import Text

                self._console.print(Text.assemble((f"[rank {rank}] ", "dim"), line))
