"""
Findings that a project knows and does not want to see: a file with one suppression a line, as for ThreadSanitizer.

    # a race in a library, reported there
    race:some_library/*
    read_after_write:copied
    collectives:evaluate

A line is KIND:PATTERN. The kind is one of a finding's kinds, or a word for several: race, collectives, any. The pattern
is a glob, which must match the function or the file of any frame of the finding. A file is matched from any of its
directories on: `train.py` and `package/train.py` both match /srv/me/package/train.py.

Standard library only, as the findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Final

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.simulator.checker.hazard import Hazard, HazardKind
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, DisagreementKind
from fsdp_conformance.simulator.frames import Frame

__all__ = ["NO_SUPPRESSIONS", "Suppressed", "Suppression", "Suppressions"]

#: Words for several kinds.
_GROUPS: Mapping[str, frozenset[str]] = {
    "race": frozenset(HazardKind) - {HazardKind.UNINITIALIZED_READ},
    "collectives": frozenset(DisagreementKind),
    "any": frozenset(HazardKind) | frozenset(DisagreementKind),
}
_KINDS: Mapping[str, frozenset[str]] = {**_GROUPS, **{kind: frozenset({kind}) for kind in sorted(_GROUPS["any"])}}


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A finding that is not reported, in one line."""

    sentence: str
    lines: tuple[int, ...]
    """The lines of the file that match it."""


@dataclass(frozen=True)
class Suppression:
    """One line of the file."""

    line: int
    kind: str
    pattern: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.pattern}"

    def matches(self, kind: str, frames: Sequence[Frame]) -> bool:
        """True for a finding of that kind with these frames."""
        if kind not in _KINDS[self.kind]:
            return False
        # Some findings have no stack.
        return self.pattern == "*" or any(self._matches(frame) for frame in frames)

    def _matches(self, frame: Frame) -> bool:
        return bool(self._function.fullmatch(frame.function) or self._file.fullmatch(f"/{frame.file}"))

    @cached_property
    def _function(self) -> re.Pattern[str]:
        return re.compile(translate(self.pattern))

    @cached_property
    def _file(self) -> re.Pattern[str]:
        return re.compile(translate(f"*/{self.pattern.removeprefix('/')}"))


@dataclass(frozen=True, slots=True)
class Suppressions:
    """The suppressions of a file."""

    file: str
    entries: tuple[Suppression, ...]

    @classmethod
    def read(cls, file: str | Path) -> Suppressions:
        """Raises ConfigError with every bad line, or if the file cannot be read."""
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError([f"the file of suppressions cannot be read: {reason}"], where=str(file)) from error
        entries: list[Suppression] = []
        problems: list[str] = []
        for number, line in enumerate(text.splitlines(), 1):
            content = re.sub(r"(^|\s)#.*", "", line).strip()
            kind, colon, pattern = (part.strip() for part in content.partition(":"))
            if not content:
                continue
            if not colon or not pattern:
                problems.append(f"line {number} must be KIND:PATTERN, such as race:load_batch, got {content!r}")
            elif kind not in _KINDS:
                problems.append(f"line {number}: the kind must be one of {', '.join(_KINDS)}, got {kind!r}")
            else:
                entries.append(Suppression(number, kind, pattern))
        if problems:
            raise ConfigError(problems, where=str(file))
        return cls(str(file), tuple(entries))

    def of_hazard(self, hazard: Hazard) -> tuple[int, ...]:
        """The lines that match a hazard: if there are any, it is not reported."""
        if not self.entries:
            return ()
        sites = (hazard.then.site, hazard.now.site, hazard.allocated, hazard.freed)
        return self._matching(hazard.kind, [frame for site in sites if site is not None for frame in site.stack])

    def of_disagreement(self, disagreement: Disagreement) -> tuple[int, ...]:
        """The lines that match a finding about collectives."""
        places = [party.place for party in disagreement.parties]
        return self._matching(disagreement.kind, [place for place in places if place is not None])

    def words(self, suppressed: Suppressed) -> str:
        """A suppressed finding with the lines that match it."""
        entries = [entry for entry in self.entries if entry.line in suppressed.lines]
        return f"{suppressed.sentence} [{', '.join(f'{self.file}:{entry.line} {entry}' for entry in entries)}]"

    def unmatched(self, suppressed: Iterable[Suppressed]) -> list[str]:
        """The entries that match none of the findings, in words."""
        matched = {line for one in suppressed for line in one.lines}
        return [f"{self.file}:{entry.line} {entry}" for entry in self.entries if entry.line not in matched]

    def _matching(self, kind: str, frames: Sequence[Frame]) -> tuple[int, ...]:
        return tuple(entry.line for entry in self.entries if entry.matches(kind, frames))


#: Everything is reported.
NO_SUPPRESSIONS: Final = Suppressions("", ())
