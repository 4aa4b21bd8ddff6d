"""The text of `fsdp-conformance explain`: a requirement or a case, and the results of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.contract import CHAPTERS, OBSERVATIONS, Contract, Requirement
from fsdp_conformance.contract.profile import Entry, Profile
from fsdp_conformance.diagnosis.advice import look_at
from fsdp_conformance.diagnosis.headline import headline_of
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report.folding import WIDTH, folded
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import SIGNS, closer, render_record
from fsdp_conformance.scenarios import rows
from fsdp_conformance.suggestions import near
from fsdp_conformance.verdict import ACCUSING, FINE, Verdict

_LABEL = 12
_FINDINGS_SHOWN = 10


def explain(
    subject: str, contract: Contract, profile: Profile, run: RunFile | None = None, *, width: int = WIDTH
) -> str:
    """
    The text about a requirement or a case, folded at `width` columns.

    Raises UsageError with the nearest ids if `subject` is neither.
    """
    records = run.records if run is not None else []
    if _is_requirement(subject, contract, profile, records):
        return _requirement(contract[subject], contract, profile, records, width=width)
    engine = (run.header.get("implementation") or {}) if run is not None else {}
    return _case(subject, contract, profile, records, with_run=run is not None, engine=engine, width=width)


def explain_json(subject: str, contract: Contract, profile: Profile, run: RunFile | None = None) -> dict[str, Any]:
    """
    The data behind the text: the requirement, if it is one; the profile's cases; the run's records of them.

    Raises UsageError like `explain`.
    """
    records = run.records if run is not None else []
    if _is_requirement(subject, contract, profile, records):
        entries = [entry for entry in profile.entries if subject in entry.requirements]
        chosen = [record for record in records if subject in record.requirements or _accuses(record, subject)]
        about: dict[str, Any] = {"requirement": codec.plain(contract[subject])}
    else:
        entries = [profile.by_id[subject]] if subject in profile.by_id else []
        chosen = [record for record in records if record.case == subject]
        about = {"requirement": None}
    return {
        **about,
        "profile": profile.name,
        "cases": codec.plain(entries),
        "records": [record.to_json() | {"headline": _headline(record)} for record in chosen],
    }


def _headline(record: CaseRecord) -> dict[str, Any] | None:
    """The finding that `run` shows, with its advice."""
    finding = headline_of(record)
    return None if finding is None else codec.plain(finding) | {"look_at": look_at(record, finding)}


def _accuses(record: CaseRecord, requirement: str) -> bool:
    return any(finding.requirement == requirement for finding in record.findings)


def _is_requirement(subject: str, contract: Contract, profile: Profile, records: Sequence[CaseRecord]) -> bool:
    """True if `subject` is a requirement, False if it is a case. Raises UsageError if it is neither."""
    if subject in contract.requirements:
        return True
    if subject in profile.by_id or any(record.case == subject for record in records):
        return False
    subjects = [*contract.requirements, *profile.by_id]
    close = near(subject, subjects)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    last = max(contract.requirements)
    raise UsageError(f"ID must be a requirement (R000 to {last}) or a case of {profile.name}, got {subject!r}.{hint}")


def _requirement(
    item: Requirement, contract: Contract, profile: Profile, records: Sequence[CaseRecord], *, width: int
) -> str:
    entries = [entry for entry in profile.entries if item.id in entry.requirements]
    lines = [f"{item.id}  {item.name}", ""]
    lines += _labelled(width, "requires", item.sentence)
    lines += _labelled(width, "level", f"{item.level.value}: {item.level.word}")
    lines += _labelled(width, "chapter", f"{item.chapter}. {CHAPTERS[item.chapter]}")
    lines += _labelled(width, "observed by", "; ".join(OBSERVATIONS[key] for key in item.observation))
    for flag in item.flags:
        sentence = CAPABILITIES[flag].sentence if flag in CAPABILITIES else contract.future_flags.get(flag, "")
        lines += _labelled(width, "flag", f"{flag}: {sentence}")
    lines += _labelled(width, "look at", item.look_at)
    for source in item.source:
        lines += _labelled(width, "source", source)
    lines += _labelled(width, "cases", f"{len(entries)} of {profile.name}" + (":" if entries else ""))
    verdicts = {record.case: record.verdict for record in records}
    for group in _methods(entries):
        lines += [" " * _LABEL + line for line in _in_short(group, verdicts)]
    accused = [record for record in records if _accuses(record, item.id)]
    for record in accused[:_FINDINGS_SHOWN]:
        lines += ["", render_record(record, width=width)]
    return "\n".join(lines)


def _methods(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The cases of each test method: those that are named after one requirement and expect the same."""
    methods: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        methods.setdefault((entry.primary, entry.title), []).append(entry)
    return list(methods.values())


def _in_short(entries: Sequence[Entry], verdicts: Mapping[str, Verdict]) -> list[str]:
    """The cases of a method in one line, `R001/sgd-*-ws{2,3}`, and a line for each that failed."""
    judged = [verdicts[entry.id] for entry in entries if entry.id in verdicts]
    if len(entries) == 1:
        return [entries[0].id + (f"   {SIGNS[judged[0]]} {judged[0]}" if judged else "")]
    line = f"{_pattern(entries)}   {len(entries)} cases"
    if judged:
        counted = Counter(judged)
        words = " · ".join(f"{counted[verdict]} {verdict}" for verdict in Verdict if counted[verdict])
        line += f"   {SIGNS[max(judged, key=list(Verdict).index)]} {words}"
    failed = [entry.id for entry in entries if entry.id in verdicts and verdicts[entry.id] not in FINE]
    return [line, *(f"  {case}   {SIGNS[verdicts[case]]} {verdicts[case]}" for case in failed)]


def _pattern(entries: Sequence[Entry]) -> str:
    """The common part of the ids, with the world sizes in braces."""
    stems = list(dict.fromkeys(entry.id.rpartition("-ws")[0] for entry in entries))
    parts = [stem.split("-") for stem in stems]
    common = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    stem = "-".join(common)
    if len(stems) > 1:
        stem += "*" if stem in stems else "-*"
    sizes = ",".join(map(str, sorted({entry.world_size for entry in entries})))
    return f"{stem}-ws{{{sizes}}}" if "," in sizes else f"{stem}-ws{sizes}"


def _case(
    subject: str,
    contract: Contract,
    profile: Profile,
    records: Sequence[CaseRecord],
    *,
    with_run: bool,
    engine: Mapping[str, Any],
    width: int,
) -> str:
    """About a case; `engine` describes that of the run, and is empty without one."""
    entry = profile.by_id.get(subject)
    lines = [subject, ""]
    if entry is not None:
        lines += _labelled(width, "expects", entry.title)
        for name in entry.requirements:
            requirement = contract.requirements.get(name)
            about = f"{name} ({requirement.level.value})  {requirement.name}" if requirement else name
            lines += _labelled(width, "binds", about)
        lines += _labelled(width, "ranks", str(entry.world_size))
        lines += _labelled(width, "needs", ", ".join(entry.needs))
        lines += _labelled(width, "machine", ", ".join(entry.environment))
        for label, words in _combined(subject, engine):
            lines += _labelled(width, label, words)
    else:
        lines += _labelled(width, "profile", f"not a case of {profile.name}")
    of_case = [record for record in records if record.case == subject]
    if with_run and not of_case:
        lines += _labelled(width, "verdict", "none: the run did not include this case")
    for record in of_case:
        lines += _record(record, width)
    return "\n".join(lines)


def _combined(case: str, engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The values that a row of the pair profile combines, and those of them that the engine of the run is asked for."""
    number = rows.number_of(case)
    if number is None:
        return
    row = rows.pairs()[number - 1]
    yield "combines", row.describe()
    if engine:
        asked = rows.for_engine(number, frozenset(engine.get("capabilities", ())), engine.get("avoids") or ())
        if asked.scenario != row:
            yield "asked for", asked.scenario.describe()


def _record(record: CaseRecord, width: int) -> list[str]:
    """Everything that the run file says about a case."""
    lines = _labelled(width, "verdict", f"{SIGNS[record.verdict]} {record.verdict}  {record.reason}")
    counted = f"{record.comparisons} comparisons of {record.elements} elements, {record.seconds:.1f} s"
    lines += _labelled(width, "compared", counted)
    for note in record.notes:
        lines += _labelled(width, "note", note)
    for key, value in record.measurements.items():
        lines += _labelled(width, "measured", f"{key} = {value}")
    telling = headline_of(record)
    if telling is not None:
        lines += _labelled(width, "headline", telling.sentence())
        lines += _labelled(width, "likely", telling.likely or "")
        lines += _labelled(width, "look at", look_at(record, telling))
    for finding in record.findings:
        lines += _labelled(width, "finding", finding.sentence())
    for sentence in record.consequences:
        lines += _labelled(width, "then", sentence)
    if record.takes is not None:
        lines += _labelled(width, "takes", record.takes.sentence())
    for title, text in _evidence(record):
        lines += ["", f"-- {title}", text.rstrip()]
    closer_look = [f"closer: {closer(record)}"] if record.verdict in ACCUSING and closer(record) else []
    return [*lines, "", f"repro: {record.repro}", *closer_look]


def _evidence(record: CaseRecord) -> list[tuple[str, str]]:
    """Long texts with their titles."""
    texts = [("traceback of the first rank that raised", record.traceback)]
    for end in record.exits:
        texts.append((f"stacks of rank {end.rank}", end.stack or ""))
        texts.append((f"last collectives of rank {end.rank}", "\n".join(end.last_collectives)))
        texts.append((f"output of rank {end.rank}", end.output))
    texts.append(("collectives of rank 0", "\n".join(record.schedule)))
    return [(title, text) for title, text in texts if text.strip()]


def _labelled(width: int, label: str, text: str) -> list[str]:
    return folded(" ".join(text.split()), width, lead=label.ljust(_LABEL), indent=" " * _LABEL)
