"""
The observations of a rank: what its engine did, as data for the referee (`cases.referee`), in the order of events.

    ObservationLog       in a rank: writes them
    ObservationReader    in the referee: reads those of one rank, while they are being written

Each rank appends to its own file, so that it never waits for the referee. Each observation carries the case's nonce,
the rank and its number: one that is missing, repeated or from elsewhere is noticed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from fsdp_conformance.errors import ConformanceError
from fsdp_conformance.history.transfer import Unreadable, from_bytes, to_bytes

#: How long a reader waits, at first and at most, before it looks again for what is not written yet.
_PAUSE_S: Final = (0.001, 0.016)
#: A file with this suffix says that the rank has ended: it writes nothing more.
_ENDED: Final = ".ended"
_HEADER: Final = 8
#: The most bytes of one observation.
_LARGEST: Final = 1 << 32
#: Errors of the process that reads, which no file of a rank can cause. The rank is not blamed for them.
_OWN_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class ObservationsEnded(ConformanceError):
    """A rank has ended before it had sent all observations of its case."""


class ObservationsInvalid(ConformanceError):
    """A rank has sent something other than its next observation."""


def observations_file(directory: str, rank: int) -> Path:
    """The file that a rank writes to."""
    return Path(directory) / f"rank{rank}.observations"


def decisions_directory(directory: str) -> str:
    """The directory of the referee's decisions, for the ranks that write to `directory`."""
    return str(Path(directory) / "referee")


def note_ended(directory: str, rank: int) -> None:
    """In the controller: let the referee know that the rank has ended."""
    observations_file(directory, rank).with_suffix(_ENDED).touch()


class ObservationLog:
    """The observations of one rank, as it writes them."""

    def __init__(self, directory: str, rank: int, nonce: str) -> None:
        self._file = os.open(observations_file(directory, rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._rank = rank
        self._nonce = nonce
        self._number = 0

    def send(self, kind: str, **content: Any) -> None:
        """Write one observation. Live objects in it arrive as `Opaque`."""
        data = to_bytes([self._nonce, self._rank, self._number, kind, content], opaque=True)
        self._number += 1
        view = memoryview(len(data).to_bytes(_HEADER, "big") + data)
        while view:
            view = view[os.write(self._file, view) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class ObservationReader:
    """
    The observations of one rank, as the referee reads them.

    `deadline_s` is how long it waits for the next one, and `pause` how: ranks that take turns must pass the turn on.
    """

    def __init__(
        self,
        directory: str,
        rank: int,
        nonce: str,
        *,
        deadline_s: float,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._pause = pause
        self._path = observations_file(directory, rank)
        self._rank = rank
        self._nonce = nonce
        self._number = 0
        self._deadline_s = deadline_s
        self._descriptor: int | None = None

    def next(self) -> tuple[str, dict[str, Any]]:
        """
        The kind and the content of the next observation. Waits until it is there.

        Raises ObservationsEnded if the rank has ended without it, or has not sent it by the deadline, and
        ObservationsInvalid if it is not what the rank had to send.
        """
        size = int.from_bytes(self._bytes(_HEADER), "big")
        if size > _LARGEST:
            raise ObservationsInvalid(f"rank {self._rank} must send at most {_LARGEST} bytes at once, got {size}")
        data = self._bytes(size)
        try:
            nonce, rank, number, kind, content = from_bytes(data)
            if (type(nonce), type(rank), type(number), type(kind), type(content)) != (str, int, int, str, dict):
                raise Unreadable("an observation is a nonce, a rank, a number, a kind and its content")
        except (Unreadable, ValueError, TypeError) as error:
            raise ObservationsInvalid(f"rank {self._rank} sent an observation that cannot be read: {error}") from error
        expected = [self._nonce, self._rank, self._number]
        if [nonce, rank, number] != expected:
            raise ObservationsInvalid(
                f"rank {self._rank} must send observation {self._number}, got {number!r} ({kind})"
            )
        self._number += 1
        return kind, content

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _bytes(self, size: int) -> bytes:
        pieces, missing, deadline = [], size, time.monotonic() + self._deadline_s
        pause_s, longest_s = _PAUSE_S
        while missing:
            # Checked before the file is read: then all that the rank wrote before it ended is read, too.
            try:
                has_ended = self._path.with_suffix(_ENDED).exists()
                data = self._read(missing)
            except OSError as error:
                if error.errno in _OWN_ERRORS:
                    raise
                raise ObservationsInvalid(f"the observations of rank {self._rank} cannot be read: {error}") from error
            if data:
                pieces.append(data)
                missing -= len(data)
            elif has_ended or time.monotonic() > deadline:
                raise ObservationsEnded(f"rank {self._rank} ended before it had sent observation {self._number}")
            else:
                self._pause(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        return b"".join(pieces)

    def _read(self, size: int) -> bytes:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return b""
        return os.read(self._descriptor, min(size, 1 << 24))
