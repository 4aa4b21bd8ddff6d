"""
Several runs on one Markdown page: a table with a row for each engine, then the summary of each run.

    python ci/summary.py RUN_FILE...

Verdicts are derived again from the run files, as by `fsdp-conformance verify`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_conformance.report import markdown
from fsdp_conformance.report.verify import Verification, verify


def page(verifications: Sequence[Verification]) -> Iterator[str]:
    """The lines of the page."""
    yield "## Conformance"
    yield ""
    yield "| engine | torch | device | verdict | cases | passed | failed | not run here |"
    yield "|---|---|---|---|---:|---:|---:|---:|"
    for verification in verifications:
        header, certificate = verification.run.header, verification.certificate
        engine, environment = header.get("implementation") or {}, header.get("environment") or {}
        counts = certificate.counts
        failed = sum(counts.get(verdict, 0) for verdict in ("FAIL", "HANG", "CRASH", "XPASS", "INCONCLUSIVE"))
        failed += sum(count for verdict, count in counts.items() if verdict.startswith("ERROR"))
        word = certificate.word if not verification.discrepancies else "DOES NOT VERIFY"
        cells = (
            f"{engine.get('name', '?')} {engine.get('version', '')}".strip(),
            environment.get("torch", "?"),
            environment.get("device", "?"),
            word,
            f"{certificate.executed} of {certificate.expected}",
            counts.get("PASS", 0),
            failed,
            counts.get("NOT_RUN_ENV", 0),
        )
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""
    for verification in verifications:
        yield from (f"- **{verification.run.path}**: {discrepancy}" for discrepancy in verification.discrepancies)
        yield markdown.summary(verification.run, verification.certificate)


if __name__ == "__main__":
    print("\n".join(page([verify(Path(path)) for path in sys.argv[1:]])))
