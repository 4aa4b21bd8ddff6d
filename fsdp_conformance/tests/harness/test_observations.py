"""The referee reads what a rank has written, in order, and notices whatever is missing or from elsewhere."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from fsdp_conformance.harness.observations import (
    ObservationLog,
    ObservationReader,
    ObservationsEnded,
    ObservationsInvalid,
    note_ended,
    observations_file,
)

#: A deadline that no test is meant to reach.
_LONG_S = 60.0


def _reader(directory: Path, nonce: str = "n", deadline_s: float = _LONG_S) -> ObservationReader:
    return ObservationReader(str(directory), 1, nonce, deadline_s=deadline_s)


def test_in_order(tmp_path: Path) -> None:
    """Also what is written after the reader has begun to wait for it."""
    log = ObservationLog(str(tmp_path), 1, "n")
    log.send("returned", value=torch.ones(2))
    later = threading.Thread(target=lambda: log.send("done"))
    reader = _reader(tmp_path)

    kind, content = reader.next()
    later.start()

    assert (kind, content["value"].tolist()) == ("returned", [1, 1])
    assert reader.next() == ("done", {})
    later.join()
    reader.close()
    log.close()


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.EMFILE, OSError), (errno.ENOMEM, OSError), (errno.EACCES, ObservationsInvalid)]
)
def test_a_rank_is_not_blamed_for_what_the_reader_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type[Exception]
) -> None:
    """Another referee may judge then. For a file that cannot be read, its owner is to blame."""
    ObservationLog(str(tmp_path), 1, "n").close()

    def refuse(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(raised, match=os.strerror(number)):
        _reader(tmp_path).next()


def test_a_rank_that_ends_early(tmp_path: Path) -> None:
    """Everything that it had written is read first, also if it has never written."""
    log = ObservationLog(str(tmp_path), 1, "n")
    log.send("returned", value=1)
    log.close()
    note_ended(str(tmp_path), 1)
    reader = _reader(tmp_path)

    assert reader.next()[0] == "returned"
    with pytest.raises(ObservationsEnded, match="rank 1 ended before it had sent observation 1"):
        reader.next()
    observations_file(str(tmp_path), 1).unlink()
    with pytest.raises(ObservationsEnded, match="observation 0"):
        _reader(tmp_path).next()


def test_a_rank_that_is_late(tmp_path: Path) -> None:
    """The deadline counts from the last observation."""
    with pytest.raises(ObservationsEnded):
        _reader(tmp_path, deadline_s=0.01).next()


def test_a_rank_that_ends_in_the_middle(tmp_path: Path) -> None:
    """Wherever its last observation is cut off."""
    log = ObservationLog(str(tmp_path), 1, "n")
    log.send("returned", value=1)
    log.close()
    note_ended(str(tmp_path), 1)
    path = observations_file(str(tmp_path), 1)
    whole = path.read_bytes()
    for length in (0, 3, 8, len(whole) - 1):
        path.write_bytes(whole[:length])

        with pytest.raises(ObservationsEnded):
            _reader(tmp_path).next()


@pytest.mark.parametrize("foreign", ["nonce", "rank", "number", "repeated", "garbage"])
def test_what_is_not_the_next_observation(tmp_path: Path, foreign: str) -> None:
    """Of another case, another rank, or another place in the order; or nothing that can be read."""
    log = ObservationLog(str(tmp_path), 1, "other" if foreign == "nonce" else "n")
    path = observations_file(str(tmp_path), 1)
    if foreign == "rank":
        log = ObservationLog(str(tmp_path), 2, "n")
        path = observations_file(str(tmp_path), 2)
    log.send("returned", value=1)
    first = path.read_bytes()
    if foreign == "number":
        log.send("returned", value=2)
    log.close()
    content = {
        "number": path.read_bytes()[len(first) :],
        "repeated": first + first,
        "garbage": (4).to_bytes(8, "big") + b"junk",
    }.get(foreign, first)
    observations_file(str(tmp_path), 1).write_bytes(content)
    reader = _reader(tmp_path)
    if foreign == "repeated":
        reader.next()

    with pytest.raises(ObservationsInvalid, match=r"rank 1 (must send observation|sent an observation that cannot)"):
        reader.next()
