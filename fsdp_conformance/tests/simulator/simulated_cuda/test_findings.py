"""Tests for merging the observations of several processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_conformance.simulator.checker.hazard import Access, Hazard, HazardKind, Site, Stream
from fsdp_conformance.simulator.frames import Frame
from fsdp_conformance.simulator.simulated_cuda.findings import Inbox, Observations, hazards_in_words

NOTHING: dict[str, Any] = {"hazards": [], "accesses": 0, "notes": [], "collectives": {"found": []}}


def access(kind: str, stream: int, line: int) -> Access:
    """The access of one line of a test's."""
    return Access(
        kind=kind,
        stream=Stream(device=0, number=stream, name="stream"),
        offset=0,
        run=16,
        repeats=(),
        allocation=1,
        site=Site(op=f"op {line}", stack=(Frame(file="/project/test_it.py", line=line, function="test_it"),)),
    )


def hazard(line: int, stream: int = 2) -> dict[str, Any]:
    """A race with line 1."""
    described = Hazard(
        kind=HazardKind.READ_AFTER_WRITE,
        then=access("write", 1, 1),
        now=access("read", stream, line),
        device=0,
        pinned=False,
        block=1,
        nbytes=16,
        allocated=None,
        freed=None,
        tenant_stream=Stream(device=0, number=1, name="stream"),
        then_block=1,
        then_nbytes=16,
        count=1,
    )
    return json.loads(json.dumps(described.to_json()))  # type: ignore[no-any-return]


def save(directory: Path, process: str, *hazards: dict[str, Any], accesses: int = 1, notes: Sequence[str] = ()) -> None:
    """As a child does."""
    content = {
        **NOTHING, "process": process, "hazards": list(hazards), "accesses": accesses, "notes": list(notes),
    }  # fmt: skip
    (directory / f"{process}.json").write_text(json.dumps(content), encoding="utf-8")


def test_the_same_race_of_several_ranks_is_one_finding(tmp_path: Path) -> None:
    """Whatever the streams; ranks are listed in order."""
    save(tmp_path, "rank 1", hazard(2, stream=3), hazard(3), accesses=5, notes=("a note",))
    save(tmp_path, "rank 0", hazard(2), accesses=4, notes=("a note",))
    (tmp_path / "unfinished.part").write_text("{", encoding="utf-8")

    observed = Inbox(tmp_path).collect({**NOTHING, "accesses": 1})

    assert [(one.hazard.now.site.op, one.count, one.processes) for one in observed.findings] == [
        ("op 2", 2, ["rank 0", "rank 1"]),
        ("op 3", 1, ["rank 1"]),
    ]
    assert (observed.accesses, observed.notes) == (10, ["a note"])
    assert "in rank 0, rank 1" in observed.texts()[0]


def test_a_race_of_this_process_names_no_process(tmp_path: Path) -> None:
    observed = Inbox(tmp_path).collect({**NOTHING, "hazards": [hazard(2)]})

    assert observed.findings[0].processes == []
    assert "  in " not in observed.texts()[0].splitlines()[-1]
    assert hazards_in_words(observed.texts()).startswith("1 hazard on the simulated accelerator\n")


def test_a_process_that_goes_on_is_not_blamed_twice(tmp_path: Path) -> None:
    """Its file holds everything so far; the next test gets what is new."""
    inbox = Inbox(tmp_path)
    save(tmp_path, "server", hazard(2), accesses=10)
    assert len(inbox.collect(NOTHING).findings) == 1
    assert inbox.collect(NOTHING) == Observations()

    save(tmp_path, "server", {**hazard(2), "count": 7}, hazard(3), accesses=25)
    later = inbox.collect(NOTHING)

    assert [one.hazard.now.site.op for one in later.findings] == ["op 3"]
    assert later.accesses == 15


def test_what_comes_later_is_joined(tmp_path: Path) -> None:
    """Looking at findings does not lose them."""
    inbox = Inbox(tmp_path)
    save(tmp_path, "rank 0", hazard(2), notes=("one",))
    first = inbox.collect(NOTHING)
    save(tmp_path, "rank 1", hazard(2), hazard(3), notes=("two",))
    both = first.joined(inbox.collect(NOTHING))

    assert [(one.count, one.processes) for one in both.findings] == [(2, ["rank 0", "rank 1"]), (1, ["rank 1"])]
    assert both.notes == ["one", "two"]
    assert both.accesses == 2
