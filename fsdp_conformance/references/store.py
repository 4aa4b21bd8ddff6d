"""
A directory of references, shared by cases, engines and runs: each entry is the references of one scenario.

An entry is a file, named by the hash of its key. Its first line says what it is; the second is the hash of the third,
which has the key and the place and the hash of each rank's section; then the sections follow. A section is one line of
JSON and the bytes of its tensors, to which that line refers. Nothing in it is ever executed.

Whatever is not as it was written is refused: another key, another hash, a missing end. With a secret of the run, the
hash of the header is one that only the referees of that run can compute, so entries of others are refused as well.

An entry is written to a temporary file, which is then renamed, so that a reader sees all of it or nothing, whoever
else is writing. Above the limit, the entries that were not used for longest are removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_conformance.history.training import TrainingHistory
from fsdp_conformance.history.transfer import NotData, Unreadable, from_bytes, to_bytes
from fsdp_conformance.references.scenario import NotShared

_MAGIC = b"fsdp-conformance references, format 1\n"
_ENTRY = ".references"
_PARTIAL = ".partial"

#: The length of a name. It is short because a case is sent the names of all entries.
_NAME = 24

#: An entry that takes more than this part of the limit is not kept.
_LARGEST = 0.25
#: A store above its limit is emptied down to this part of it.
_FULL = 0.8


class Refused(Exception):
    """An entry that is not what was written, with the reason."""


def entry_name(key: Mapping[str, str]) -> str:
    """The name of the entry with this key."""
    return hashlib.sha256(_line(dict(key))).hexdigest()[:_NAME]


def section(histories: Mapping[str, TrainingHistory], absent: Mapping[str, str]) -> bytes:
    """
    One rank's part of an entry, as bytes: equal for equal content. Raises NotShared for what cannot be written.

    The wall time of a training is left out.
    """
    timeless = {name: dataclasses.replace(history, seconds=0.0) for name, history in histories.items()}
    try:
        return to_bytes({"histories": timeless, "absent": dict(absent)})
    except NotData as error:
        raise NotShared(str(error)) from error


def content_of(data: bytes) -> Any:
    """The content of a section, by "histories" and "absent". Raises Refused."""
    try:
        return from_bytes(data)
    except Unreadable as error:
        raise Refused(str(error)) from error


class ReferenceStore:
    """
    The directory. What the file system refuses is no error here: `read` refuses the entry, and `write` returns False.
    """

    def __init__(self, directory: Path, limit: int, secret: str = "") -> None:
        self.directory = directory
        self.limit = limit
        self._secret = secret.encode()

    def path(self, name: str) -> Path:
        """The file of an entry."""
        return self.directory / f"{name}{_ENTRY}"

    def names(self) -> frozenset[str]:
        """The names of the entries."""
        try:
            return frozenset(path.stem for path in self.directory.iterdir() if path.suffix == _ENTRY)
        except OSError:
            return frozenset()

    def read(self, key: Mapping[str, str], rank: int) -> bytes | None:
        """A rank's section of the entry with this key; None if there is no entry. Raises Refused."""
        path = self.path(entry_name(key))
        try:
            with path.open("rb") as file:
                if file.readline() != _MAGIC:
                    raise Refused("its first line is not that of an entry of this version")
                stated_hash, header = file.readline().strip(), file.readline()
                if not hmac.compare_digest(self._hash(header), stated_hash):
                    raise Refused("its header does not match its hash")
                content = json.loads(header)
                if content["key"] != dict(key):
                    raise Refused("its key is another one")
                place = content["sections"][rank]
                file.seek(place["begin"], os.SEEK_CUR)
                data = file.read(place["size"])
            if len(data) != place["size"] or hashlib.sha256(data).hexdigest() != place["sha256"]:
                raise Refused(f"the section of rank {rank} does not match its hash")
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"it cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Refused(f"its header cannot be read: {type(error).__name__}: {error}") from error
        return data

    def write(self, key: Mapping[str, str], sections: Sequence[bytes]) -> bool:
        """Keep the sections of all ranks. False if the entry is too large, or the file system refuses."""
        places, begin = [], 0
        for data in sections:
            places.append({"begin": begin, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
            begin += len(data)
        if begin > _LARGEST * self.limit:
            return False
        header = _line({"key": dict(key), "sections": places})
        stated = self._hash(header) + b"\n"
        name = entry_name(key)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(dir=self.directory, prefix=name, suffix=_PARTIAL)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.writelines((_MAGIC, stated, header, *sections))
                os.replace(partial, self.path(name))
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
        except OSError:
            return False
        self._trim()
        return True

    def _hash(self, header: bytes) -> bytes:
        if not self._secret:
            return hashlib.sha256(header).hexdigest().encode()
        return hmac.new(self._secret, header, hashlib.sha256).hexdigest().encode()

    def remove(self, name: str) -> None:
        """Remove an entry."""
        with contextlib.suppress(OSError):
            self.path(name).unlink(missing_ok=True)

    def _trim(self) -> None:
        """Remove the entries that were not used for longest, and partial files of writers that were killed."""
        entries = []
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        if total <= self.limit:
            return
        for _, size, path in sorted(entries):
            if total <= _FULL * self.limit:
                return
            if path.suffix in (_ENTRY, _PARTIAL):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    total -= size


def _line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
