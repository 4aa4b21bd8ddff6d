"""
A directory of references, shared by cases, engines and runs: each entry is the references of one scenario.

An entry is a file, named by the hash of its key. Its first line says what it is; the second is the hash of the third,
which has the key and the place and the hash of each rank's section; then the sections follow. A section is one line of
JSON, in which tensors are places in the bytes after it. Nothing in it is ever executed.

Whatever is not as it was written is refused: another key, another hash, a missing end. An entry is written to a file of
its own and renamed, so that a reader sees all of it or nothing, whoever else is writing. Above the limit, the entries
that were not used for longest are removed.

A mark is an empty file with the name of an entry that some case would have used: the next case that can trains it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.references.scenario import NotShared, tensor_bytes

_MAGIC = b"fsdp-conformance references, format 1\n"
_ENTRY = ".references"
_MARK = ".wanted"
_PARTIAL = ".partial"

#: Letters of a name: a case is sent the names of all entries.
_NAME = 24

#: An entry that takes more than this part of the limit is not kept, and a full store is emptied down to the second.
_LARGEST = 0.25
_FULL = 0.8
#: The most marks that are kept.
MAX_MARKS = 4096

_RECORDS = {kind.__name__: kind for kind in (TrainingHistory, StepRecord)}


class Refused(Exception):
    """An entry that is not what was written, with the reason."""


def entry_name(key: Mapping[str, str]) -> str:
    """The name of the entry with this key."""
    return hashlib.sha256(_line(dict(key))).hexdigest()[:_NAME]


def section(content: Any) -> bytes:
    """
    One rank's part of an entry, as bytes: equal for equal content. Raises NotShared for what cannot be written.

    The wall time of a training is left out.
    """
    pieces: list[bytes] = []
    structure = _encoded(content, pieces)
    return _line(structure) + b"".join(pieces)


def content_of(data: bytes) -> Any:
    """The inverse of `section`. Raises Refused."""
    line, _, rest = data.partition(b"\n")
    try:
        reader = _Reader(rest)
        value = reader.decoded(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Refused(f"its structure cannot be read: {type(error).__name__}: {error}") from error
    if reader.position != len(rest):
        raise Refused(f"expected {reader.position} bytes of tensors, got {len(rest)}")
    return value


class ReferenceStore:
    """The directory. Whatever a file system may refuse counts as an entry that is not there."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit

    def path(self, name: str) -> Path:
        """The file of an entry."""
        return self.directory / f"{name}{_ENTRY}"

    def names(self) -> tuple[frozenset[str], frozenset[str]]:
        """The entries, and the marks."""
        names: dict[str, set[str]] = {_ENTRY: set(), _MARK: set()}
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                names.get(path.suffix, set()).add(path.stem)
        return frozenset(names[_ENTRY]), frozenset(names[_MARK])

    def read(self, key: Mapping[str, str], rank: int) -> bytes | None:
        """A rank's section of the entry with this key; None if there is no entry. Raises Refused."""
        path = self.path(entry_name(key))
        try:
            with path.open("rb") as file:
                if file.readline() != _MAGIC:
                    raise Refused("its first line is not that of an entry of this version")
                stated, header = file.readline().strip(), file.readline()
                if hashlib.sha256(header).hexdigest().encode() != stated:
                    raise Refused("its header does not match its hash")
                content = json.loads(header)
                if content["key"] != dict(key):
                    raise Refused("its key is another one")
                about = content["sections"][rank]
                file.seek(about["begin"], os.SEEK_CUR)
                data = file.read(about["size"])
            if len(data) != about["size"] or hashlib.sha256(data).hexdigest() != about["sha256"]:
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
        stated = hashlib.sha256(header).hexdigest().encode() + b"\n"
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
            self._mark(name).unlink(missing_ok=True)
        except OSError:
            return False
        self._trim()
        return True

    def want(self, name: str) -> None:
        """Mark an entry that is missing."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len(self.names()[1]) < MAX_MARKS:
                self._mark(name).touch()

    def remove(self, name: str) -> None:
        """Remove an entry."""
        with contextlib.suppress(OSError):
            self.path(name).unlink(missing_ok=True)

    def _mark(self, name: str) -> Path:
        return self.directory / f"{name}{_MARK}"

    def _trim(self) -> None:
        """Remove the entries that were not used for longest, and what writers that were killed have left."""
        entries = []
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):
                about = path.stat()
                entries.append((about.st_mtime_ns, about.st_size, path))
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


def _encoded(value: Any, pieces: list[bytes]) -> Any:
    """The value as JSON: plain values as they are, the rest as a list that begins with its kind."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]
    if kind in (list, tuple):
        return [kind.__name__, *(_encoded(item, pieces) for item in value)]
    if kind is dict and all(type(name) is str for name in value):
        return ["dict", *([name, _encoded(item, pieces)] for name, item in value.items())]
    if kind is Tensor and value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad:
        data = tensor_bytes(value)
        pieces.append(data)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if kind.__name__ in _RECORDS and kind is _RECORDS[kind.__name__]:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if kind is TrainingHistory:
            fields["seconds"] = 0.0
        return ["record", kind.__name__, _encoded(fields, pieces)]
    raise NotShared(f"the history has a {kind.__module__}.{kind.__qualname__}, which is not written down")


class _Reader:
    """Decodes a structure, and takes the tensors from the bytes in the order in which they were written."""

    def __init__(self, data: bytes) -> None:
        self.bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        self.position = 0

    def decoded(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind == "float":
            return float.fromhex(rest[0])
        if kind in ("list", "tuple"):
            items = [self.decoded(item) for item in rest]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {name: self.decoded(item) for name, item in rest}
        if kind == "tensor":
            return self._tensor(rest[0], rest[1])
        if kind == "record":
            return _RECORDS[rest[0]](**self.decoded(rest[1]))
        raise ValueError(f"unknown kind {kind!r}")

    def _tensor(self, dtype_name: str, shape: list[int]) -> Tensor:
        dtype = getattr(torch, dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype_name!r} is not a dtype")
        size = math.prod(shape) * dtype.itemsize
        # A copy, because the bytes of a tensor need not begin where its dtype may.
        data = self.bytes[self.position : self.position + size].clone()
        if len(data) != size or min(shape, default=0) < 0:
            raise ValueError(f"expected {size} bytes of a tensor of shape {shape}, got {len(data)}")
        self.position += size
        return data.view(dtype).view(shape)
