"""`fsdp-conformance verify`: derive the verdict again from a run file alone, offline."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fsdp_conformance.cli import messages, report_dir
from fsdp_conformance.cli.expected import expected_by
from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.contract.selection import left_out_by
from fsdp_conformance.report import markdown, terminal
from fsdp_conformance.report.folding import screen_width
from fsdp_conformance.report.signature import public_key, signature_problem
from fsdp_conformance.report.verify import verify
from fsdp_conformance.run_settings import settings_from_json


def main(arguments: argparse.Namespace) -> int:
    """Print what the file shows, and its contradictions. Returns the exit status that the run should have had."""
    path = report_dir.named_run(arguments.run_file)
    expected = expected_by(arguments, look=False)
    key = public_key(Path(arguments.key)) if arguments.key else None
    verification = verify(path, load_profile(arguments.profile) if arguments.profile else None)
    if key is not None and (problem := signature_problem(path, verification.run.chain, key)):
        verification = replace(verification, discrepancies=(*verification.discrepancies, problem))
    run, certificate = verification.run, verification.certificate
    profile = verification.profile
    settings = settings_from_json(run.header.get("settings") or {})
    selected = {entry.id for entry in profile.entries if not left_out_by(entry.case(), settings)}
    judged = expected.judged(verification, profile)
    if arguments.html:
        report_dir.write_text(Path(arguments.html), expected.page(verification, judged, selected), option="--html")
    if arguments.markdown:
        print(markdown.summary(run, certificate, judged), end="")
        return verification.status
    if arguments.json:
        compared: list[str] = []
        status = expected.status(verification, profile=profile, selected=selected, say=compared.append)
        messages.say_json(
            {
                "run": str(path),
                "implementation": run.header.get("implementation"),
                "certificate": certificate.to_json(),
                "discrepancies": verification.discrepancies,
                "compared": [line.strip() for text in compared for line in text.splitlines()],
                "last_hash": run.chain,
                "status": int(status),
            }
        )
        return status
    implementation = run.header.get("implementation") or {}
    name, version = implementation.get("name", "an unknown implementation"), implementation.get("version", "")
    messages.say(f"{path}: {name} {version}".rstrip(), path)
    messages.say(terminal.summary_line(certificate, seconds=run.seconds))
    text = terminal.certificate_text(certificate, width=screen_width())
    if text:
        print(text)
    for discrepancy in verification.discrepancies:
        messages.complain(discrepancy)
    print(f"last hash: {run.chain}")
    print(verification.outcome)
    if key is not None and not verification.discrepancies:
        print(f"signed: by the holder of the key {arguments.key}")
    return expected.status(verification, profile=profile, selected=selected)
