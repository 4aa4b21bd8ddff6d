"""
The collectives of each case as a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

A case is a process and a rank is a thread. The run file keeps the order of collectives, not their times, so an event's
place on the axis is its number in the order, one microsecond each: lengths mean nothing. Rank 0 shows the collectives
of its trainings; for a case that did not pass, every rank also shows those before its end, with their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.certificate import Certificate
from fsdp_conformance.report.expectations import NO_LIST, Judged
from fsdp_conformance.report.html.pictures import scheduled, traced
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.verdict import Verdict

#: Thread ids: the schedule of rank 0 comes first, then the ranks before their ends.
_SCHEDULE = 0


def text(run: RunFile, certificate: Certificate, judged: Judged = NO_LIST) -> str:
    """The whole file, for every case that issued a collective."""
    del certificate, judged
    events = [event for number, record in enumerate(run.records) for event in _events(number, record)]
    content = {
        "traceEvents": events,
        "otherData": {"axis": "the number of a collective in its order, not a time", "run": run.path},
    }
    return json.dumps(content, ensure_ascii=False) + "\n"


def _events(process: int, record: CaseRecord) -> Iterator[dict[str, Any]]:
    ends = [end for end in record.exits if end.last_collectives] if record.verdict is not Verdict.PASS else []
    if not record.schedule and not ends:
        return
    yield _name("process_name", process, _SCHEDULE, f"{record.case} {record.verdict}")
    if record.schedule:
        yield _name("thread_name", process, _SCHEDULE, "rank 0, training")
        yield from _schedule(process, record.schedule)
    for end in ends:
        yield _name("thread_name", process, end.rank + 1, f"rank {end.rank}, before its end")
        for place, line in enumerate(end.last_collectives):
            match = traced(line)
            number = int(match["number"]) if match else place
            words = f"{match['op']} {match['bytes']} B" if match else line
            arguments = {"line": line, "ended": match is not None and match["state"] == "closed"}
            yield _event(process, end.rank + 1, number, words, match["op"] if match else "", arguments)


def _schedule(process: int, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines):
        match = scheduled(line)
        words = f"{match['op']} {match['bytes']} B" if match else line
        arguments = {"line": line, "phase": match["phase"] if match else ""}
        yield _event(process, _SCHEDULE, number, words, match["op"] if match else "", arguments)


def _event(
    process: int, thread: int, number: int, name: str, category: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {"name": name, "cat": category or "collective", "ph": "X", "pid": process, "tid": thread, "ts": number,
            "dur": 1, "args": arguments}  # fmt: skip


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
