"""
Deriving a run's certificate again from its file alone: no torch, no device, no trust in the footer.

What a file says of itself chooses nothing that is opened: a profile that the suite does not ship must be given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdp_conformance.contract.profile import RENAMED, Profile, load_profile, shipped
from fsdp_conformance.contract.scopes import title
from fsdp_conformance.errors import RunFileError
from fsdp_conformance.report.certificate import Certificate, State, certify
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.runfile import read
from fsdp_conformance.status import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of verifying a run file."""

    run: RunFile
    profile: Profile
    """That of the run, or the one that was given."""
    certificate: Certificate
    """As derived here."""
    discrepancies: tuple[str, ...]
    """Where the file was altered, or where its footer differs from what follows from its lines."""

    @property
    def outcome(self) -> str:
        """The result of the verification in words."""
        if self.discrepancies:
            return "does not verify"
        if not self.run.is_of_this_suite:
            return (
                "not verified: the hashes are intact, but only the version of the suite that made the run can judge it"
            )
        return "verified: the stated result follows from the lines of the file"

    @property
    def status(self) -> int:
        """The exit status of the certificate; a file that does not verify cannot certify."""
        return Status.NOT_CERTIFIED if self.discrepancies else self.certificate.status


def verify(path: Path, profile: Profile | None = None) -> Verification:
    """
    Derive the certificate from the run file at `path`.

    Raises RunFileError if it is not a run file, or if its profile is not shipped and not given.
    """
    run = read(path)
    profile = profile or profile_of(run)
    certificate = certify(run, profile)
    return Verification(
        run=run, profile=profile, certificate=certificate, discrepancies=tuple(_discrepancies(run, certificate))
    )


def profile_of(run: RunFile) -> Profile:
    """The profile that the run names. Raises RunFileError if the suite does not ship it: no file is opened for it."""
    name = str((run.header.get("profile") or {}).get("name"))
    if name in RENAMED:
        raise RunFileError(
            f"{run.path} is a run of the profile {name!r}, which is called {RENAMED[name]} now: to read it, add "
            f"--profile {RENAMED[name]}"
        )
    if name.endswith(".json") or shipped(name) is None:
        raise RunFileError(
            f"{run.path} is a run of the profile {name!r}, which is not shipped with the suite: give its file with "
            "--profile FILE.json"
        )
    return load_profile(name)


def _discrepancies(run: RunFile, certificate: Certificate) -> list[str]:
    problems = list(run.problems)
    if run.footer is None:
        problems.append(_missing(run))
        return problems
    if not run.is_of_this_suite:
        # Its own version may have judged it otherwise, and the certificate says so.
        return problems
    stated = run.footer.get("certificate") or {}
    # Reasons and remarks are words, which may be put better in another version.
    derived = certificate.to_json()
    problems += [
        f"{key}: the footer says {stated.get(key)!r}, but the lines yield {derived[key]!r}"
        for key in ("certified", "private", "profile", "counts", "executed", "expected", "unobserved")
        if stated.get(key) != derived[key]
    ]
    if (counts := run.footer.get("counts")) != derived["counts"]:
        problems.append(f"counts: the footer says {counts!r} in all, but the lines yield {derived['counts']!r}")
    references = run.footer.get("references")
    # A run of an earlier version counts none.
    if references not in (None, counted := run.reference_counts()):
        problems.append(f"references: the footer says {references!r}, but the lines yield {counted!r}")
    granted = [
        sorted(title(tuple(scope["names"])) for scope in source.get("scopes") or () if scope["state"] == State.PASSED)
        for source in (stated, derived)
    ]
    if granted[0] != granted[1]:
        problems.append(f"scopes: the footer grants {_listed(granted[0])}, but the lines {_listed(granted[1])}")
    return problems


def _missing(run: RunFile) -> str:
    """The sentence on a run that was ended before its end."""
    running = f", and {', '.join(run.unfinished())} had begun" if run.unfinished() else ""
    cases = (run.header.get("profile") or {}).get("cases", "?")
    return (
        f"the run did not finish: {len(run.records)} of {cases} cases have a verdict{running}. "
        "`run --resume` continues it"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
