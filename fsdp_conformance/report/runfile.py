"""
The run file: what a run did, one JSON object a line, appended as it happens.

    {"type": "header", ...}     suite, profile and its hash, implementation, environment, settings
    {"type": "start", ...}      a case starts
    {"type": "case", ...}       its record (`outcome.CaseRecord`)
    {"type": "note", ...}       something that a reader of the certificate should know
    {"type": "resume", ...}     the run was ended, and goes on here; cases that were running begin again
    {"type": "footer", ...}     counts, certificate; missing if the run was aborted

Each line is on disk before the next case starts, so a run that ends for any reason leaves a readable file. Each line
carries the hash of itself and of all lines before it, which reveals edited, removed and added lines. The hash is not a
signature: anyone who rewrites the whole file can compute new hashes, but then the last one is not the one that the run
printed, nor the one that `report.signature` has signed.

What is read is only content: no text in it names a file that is opened, and control characters come as their escapes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_conformance import codec, stress
from fsdp_conformance.errors import EnvironmentUnavailable, RunFileError
from fsdp_conformance.outcome.records import (
    ABSENT,
    INAPPLICABLE,
    REFERENCES,
    UNDECLARED,
    CaseRecord,
    case_record_from_json,
)
from fsdp_conformance.report.run_content import FORMAT, Note, Resume, RunFile, Start
from fsdp_conformance.report.schema import LINES
from fsdp_conformance.report.signature import signature_file
from fsdp_conformance.run_settings import RANKS, SHARED_DEVICES
from fsdp_conformance.visible import visible_content

#: Formats that can be read. Only the newest can certify.
READABLE = (1, 2)

#: The name of the file in a report directory, and of an earlier file there.
NAME = "run.jsonl"
PREVIOUS = "run.previous.jsonl"

_SEED = "fsdp-conformance run file"

#: The types of measurements that a certificate is derived from. All others are figures for people.
_MEASURED: dict[str, Any] = {
    **dict.fromkeys((UNDECLARED, ABSENT, INAPPLICABLE), list[str]),
    **dict.fromkeys((REFERENCES, stress.MEASUREMENT), dict[str, int | dict[str, int]]),
    stress.STRUCK: str,
}

#: Kinds of ranks that end one case after the other on the host of their worker.
_ENDS_IN_ORDER = (RANKS[0], SHARED_DEVICES)


class RunFileWriter:
    """
    Appends lines to a new run file, or with `resumed` to the one in the directory, which no other process may write.
    The file of an earlier run in the directory is renamed to PREVIOUS.

    Raises EnvironmentUnavailable if a line cannot be written. What was written before stays intact, and nothing more
    is written.
    """

    def __init__(self, directory: Path, *, resumed: bool = False) -> None:
        self.path = directory / NAME
        self._chain = _SEED
        self._size = 0
        self._fd: int | None = None
        try:
            if not resumed:
                directory.mkdir(parents=True, exist_ok=True)
                set_aside(directory)
            new = os.O_CREAT | os.O_EXCL if not resumed else 0
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | new, 0o644)
            self._lock(self._fd)
        except OSError as error:
            raise EnvironmentUnavailable(
                f"the run file {self.path} cannot be {'continued' if resumed else 'created'}: "
                f"{error.strerror or error}. Choose a writable directory with --report."
            ) from error
        if resumed:
            self._continue(self._fd)

    def header(self, content: Mapping[str, Any]) -> None:
        """The first line."""
        self._append({"type": "header", "format": FORMAT, **content})

    def start(self, case: str, *, world_size: int, worker: str = "") -> None:
        """A case starts."""
        self._append({"type": "start", **codec.plain(Start(case=case, world_size=world_size, worker=worker))})

    def case(self, record: CaseRecord) -> None:
        """The verdict on a case."""
        self._append({"type": "case", **record.to_json()})

    def note(self, text: str, *, refuses: bool = False) -> None:
        """Something to know. With `refuses` it rules out a certificate."""
        self._append({"type": "note", **codec.plain(Note(text=text, refuses=refuses))})

    def resume(self, content: Resume) -> None:
        """The run goes on."""
        self._append({"type": "resume", **codec.plain(content)})

    def footer(self, content: Mapping[str, Any]) -> None:
        """The last line."""
        self._append({"type": "footer", **content})
        self.close()

    @property
    def chain(self) -> str:
        """The hash of everything written so far."""
        return self._chain

    def close(self) -> None:
        """Write nothing more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _lock(self, fd: int) -> None:
        """Keep the file for this process, for as long as it is open. Where files cannot be locked, nothing happens."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise EnvironmentUnavailable(
                f"the run file {self.path} is still being written: wait for the end of the run, or end its processes"
            ) from None
        except OSError:
            return

    def _continue(self, fd: int) -> None:
        """Go on at the end of the last line that is whole."""
        with self.path.open("rb") as file:
            self._size = file.read().rfind(b"\n") + 1
        os.ftruncate(fd, self._size)
        self._chain = read(self.path).chain

    def _append(self, content: Mapping[str, Any]) -> None:
        if self._fd is None:
            return
        text = codec.encode(content)
        chain = chained(self._chain, text)
        line = f'{text[:-1]},"chain":"{chain}"}}\n'.encode()
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
            os.fsync(self._fd)
        except OSError as error:
            # Remove an incomplete line: it would make the file look damaged.
            os.ftruncate(self._fd, self._size)
            self.close()
            raise EnvironmentUnavailable(
                f"the run file {self.path} cannot be written: {error.strerror or error}. "
                "What was written before is intact. Free some space, or choose another directory with --report."
            ) from error
        self._chain = chain
        self._size += len(line)


def set_aside(directory: Path) -> None:
    """Rename the file of an earlier run in the directory, with its signature. Raises OSError if that is impossible."""
    earlier, aside = directory / NAME, directory / PREVIOUS
    if earlier.exists():
        earlier.replace(aside)
        if signature_file(earlier).exists():
            signature_file(earlier).replace(signature_file(aside))
        else:
            signature_file(aside).unlink(missing_ok=True)


def read(path: Path) -> RunFile:
    """
    The run file at `path`, or in the directory `path`.

    Raises RunFileError if there is none, or if the first line is not a header of a known format. All other defects are
    in `problems`.
    """
    path = path / NAME if path.is_dir() else path
    lines = _bytes_of(path).split(b"\n")
    torn = lines.pop()
    run = RunFile(path=str(path), header=_header(lines[0] if lines else torn, path), chain=_SEED)
    order = _Order()
    for number, line in enumerate(lines, start=1):
        _take(run, order, line, number)
    run.misplaced = order.problems
    if torn:
        run.problems.append(f"line {len(lines) + 1} is incomplete: the run ended while writing it")
    return run


def _bytes_of(path: Path) -> bytes:
    """The content of the file. A pipe or a device could make a reader wait for ever, and is refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RunFileError(f"the run file must be a regular file, got {path}, which is not one")
            return file.read()
    except OSError as error:
        raise RunFileError(f"the run file {path} cannot be read: {error.strerror or error}") from error


@dataclass(slots=True)
class _Order:
    """The order in which a run writes its lines: each worker finishes one case before it starts the next."""

    problems: list[str] = field(default_factory=list)
    _running: dict[str, Start] = field(default_factory=dict)
    """By worker."""
    _worker_of: dict[str, str] = field(default_factory=dict)
    """By case, once it has started."""
    _ended: dict[str, float] = field(default_factory=dict)
    """By worker, when the ranks of its last case had ended."""

    def start(self, start: Start, number: int) -> None:
        """Take the start of a case."""
        if start.case in self._worker_of:
            self.problems.append(f"line {number}: {start.case} starts a second time")
        running = self._running.get(start.worker)
        if running is not None:
            self.problems.append(f"line {number}: {start.case} starts while its worker still runs {running.case}")
        self._running[start.worker], self._worker_of[start.case] = start, start.worker

    def resume(self) -> tuple[str, ...]:
        """The run was ended here. Returns the cases that were running: they begin again, maybe on another worker."""
        cases = tuple(start.case for start in self._running.values())
        for case in cases:
            del self._worker_of[case]
        self._running.clear()
        # Another process, which may be on the machine after a restart, where time begins again.
        self._ended.clear()
        return cases

    def end(self, record: CaseRecord, number: int) -> None:
        """Take the verdict on a case."""
        worker = self._worker_of.get(record.case)
        running = self._running.get(worker) if worker is not None else None
        if worker is None or running is None or running.case != record.case:
            self.problems.append(f"line {number}: the verdict on {record.case} comes while the case does not run")
            return
        del self._running[worker]
        if running.world_size != record.world_size:
            self.problems.append(
                f"line {number}: {record.case} started with {running.world_size} ranks and ended with "
                f"{record.world_size}"
            )
        if not record.exits or record.ranks not in _ENDS_IN_ORDER:
            return
        times = [end.time for end in record.exits]
        if min(times) < self._ended.get(worker, min(times)):
            self.problems.append(f"line {number}: ranks of {record.case} ended before those of the case before it")
        self._ended[worker] = max(times)

    def finish(self, header: Mapping[str, Any], footer: Mapping[str, Any], number: int) -> None:
        """Take the footer."""
        started, finished = str(header.get("started", "")), str(footer.get("finished", ""))
        if started and finished and finished < started:
            self.problems.append(f"line {number}: the run finished at {finished}, before it had started at {started}")


def _header(line: bytes, path: Path) -> dict[str, Any]:
    try:
        header = _content(line, "type")
        if header["type"] != "header" or header.get("format") not in READABLE:
            raise ValueError(
                f"expected a header of format {' or '.join(map(str, READABLE))}, "
                f"got type={header['type']!r} format={header.get('format')!r}"
            )
        _unknown_keys(header)
    except ValueError as error:
        raise RunFileError(f"{path} is not a run file of this version: its first line: {error}") from error
    return _with_parts(header)


def _with_parts(header: Mapping[str, Any]) -> dict[str, Any]:
    """The header as readers get it: visible, and with a mapping for each part that has names of its own."""
    shown: dict[str, Any] = visible_content(header)
    for part in ("profile", "implementation", "environment", "settings"):
        if shown.get(part) is None:
            shown[part] = {}
    return shown


def _take(run: RunFile, order: _Order, line: bytes, number: int) -> None:
    """Add one line to the run, or a problem."""
    try:
        content = _content(line, "type", "chain")
        kind, stated = content.pop("type"), content.pop("chain")
        text = line.decode()
        # Nothing may follow the hash: it would be read without being hashed.
        body = text.removesuffix(f',"chain":"{stated}"}}')
        chain = chained(run.chain, body + "}") if body != text else ""
        if chain != stated:
            run.problems.append(f"line {number} ({kind}) does not match its hash: the file was edited")
        run.chain = stated
        if run.footer is not None:
            run.problems.append(f"line {number} ({kind}) comes after the footer")
        content = visible_content(content)
        own = run.is_of_this_suite
        if kind in ("header", "footer") and (unknown := _unknown_keys({**content, "type": kind}, deep=own)):
            run.problems.append(f"line {number} ({kind}) has unknown keys: {', '.join(unknown)}")
        if kind == "header":
            if number > 1:
                run.problems.append(f"line {number} is a second header")
            content.pop("format", None)
            run.header = run.header if number > 1 else _with_parts(content)
        elif kind == "start":
            start = codec.typed(Start, content)
            run.started.append(start.case)
            order.start(start, number)
        elif kind == "case":
            record = _record(content)
            run.records.append(record)
            order.end(record, number)
        elif kind == "resume":
            run.parts.append(codec.typed(Resume, content))
            running = order.resume()
            run.started = [case for case in run.started if case not in running]
            run.interrupted += running
        elif kind == "note":
            run.notes.append(codec.plain(codec.typed(Note, content)))
        elif kind == "footer":
            order.finish(run.header, content, number)
            run.footer = content
        else:
            run.problems.append(f"line {number} is of type {kind!r}, which is unknown")
    except ValueError as error:
        run.problems.append(f"line {number} cannot be read: {error}")


def _record(content: dict[str, Any]) -> CaseRecord:
    """The record in a line. Raises ValueError if it, or a measurement that a certificate needs, has another form."""
    record = case_record_from_json(content)
    for name, kind in _MEASURED.items():
        if name in record.measurements:
            try:
                codec.typed(kind, record.measurements[name])
            except ValueError as error:
                raise ValueError(f"the measurement {name!r}: {error}") from None
    return record


def _unknown_keys(content: Mapping[str, Any], *, deep: bool = False) -> list[str]:
    """
    The keys that a header or footer should not have, at any depth if `deep`: other versions may have more inside.

    Raises ValueError if a value has the wrong type.
    """
    own = {key: item for key, item in content.items() if key not in ("type", "format", "chain")}
    return codec.unknown_keys(LINES[content["type"]], own, deep=deep)


def _content(line: bytes, *keys: str) -> dict[str, Any]:
    """Parse a line. Raises ValueError unless it is an object that has these keys, with strings."""
    content = codec.parsed(line.decode())
    if not isinstance(content, dict):
        raise ValueError(f"it must be a JSON object, got {type(content).__name__}")
    for key in keys:
        if not isinstance(content.get(key), str):
            raise ValueError(f"`$.{key}` must be a string, got {content.get(key)!r}")
    return content


def chained(chain: str, text: str) -> str:
    """The hash of a line and of all before it."""
    return hashlib.sha256(f"{chain}\n{text}".encode()).hexdigest()
