"""`fsdp-conformance explain`: a requirement or a case, and what a run found."""

from __future__ import annotations

import argparse

from fsdp_conformance import contract, docs
from fsdp_conformance.cli import messages, report_dir
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.report import explanation, runfile
from fsdp_conformance.report.folding import screen_width
from fsdp_conformance.report.last_run import DEFAULT_ROOT, LAST, last_run
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.verify import profile_of
from fsdp_conformance.run_settings import DEFAULTS
from fsdp_conformance.status import Status


def main(arguments: argparse.Namespace) -> int:
    """Print it. Without --report, results come from the last run in the working directory, if there is one."""
    path = report_dir.named_run(arguments.report) if arguments.report else last_run()
    run = runfile.read(path) if path is not None else None
    if arguments.profile is None and run is not None:
        profile = profile_of(run)
    else:
        profile = load_profile(arguments.profile or DEFAULTS.profile)
    if arguments.json:
        content = explanation.explain_json(arguments.name, contract.load(), profile, run)
        messages.say_json({**content, "run": None if path is None else str(path)})
        return Status.CERTIFIED
    if run is not None and path is not None:
        print(f"results of {_words(run)}, from {path}\n")
    print(explanation.explain(arguments.name, contract.load(), profile, run, width=screen_width()))
    is_requirement = arguments.name in contract.load().requirements
    print(f"\n{docs.see(docs.requirement(arguments.name) if is_requirement else docs.VERDICT)}")
    if path is None:
        print()
        messages.say(f"no results: there is no run in {DEFAULT_ROOT / LAST}; name one with --report")
    return Status.CERTIFIED


def _words(run: RunFile) -> str:
    """The engine of a run and when it ran: whoever means another run has to see it at once."""
    implementation, settings = run.header.get("implementation") or {}, run.header.get("settings") or {}
    name = " ".join(str(implementation.get(key) or "") for key in ("name", "version")).strip()
    started = str(run.header.get("started") or "an unknown time").replace("T", " ")
    return f"{name or 'an unknown implementation'} ({settings.get('implementation')}), {started}"
