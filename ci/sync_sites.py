"""Drops the synchronisation call sites of torch's engines one by one: see ci/sync-sites."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator.checker.sync_sites import site_from_id
from fsdp_conformance.simulator.device import build
from studies.stream_ranks import run_on_ranks
from studies.stream_study import Job, study
from studies.stream_trainings import TRAININGS

LIST = Path(__file__).parent / "sync-sites.toml"

#: Runs per launch of ranks: a rank that runs for long accumulates memory.
BATCH = 120

#: The engines whose waits are studied; the program's own waits are not.
ENGINES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "torch": "shared code",
    "group": "process group",
}

#: Assume that memory is reused in the worst way that a caching allocator could choose.
REUSE = "worst_case"

#: In how many trainings a site without effect is dropped together with other sites.
PAIR_TRAININGS = 2

FLAGGED, NUMERICS, MEMORY, REDUNDANT, UNSEEN = "flagged", "numerics", "memory", "redundant", "unseen"
SEEN = (FLAGGED, NUMERICS, MEMORY)

#: A proof written by hand.
READING = "reading"

#: What a single run shows besides SEEN. Same order: nothing, and no access knew less than with the wait.
SAME_ORDER = "same order"
NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One site of the list."""

    site: str
    """Its id."""
    engine: str
    verdict: str
    """
    flagged: without it the checker reports a race. numerics: results differ. memory: more memory is held than with it.
    redundant: it can be removed, for the reason in `proof`. unseen: the checker cannot see what it is for; `reason`
    explains why.
    """
    executed_in: int
    """How many trainings execute it."""
    training: str
    """A training in which dropping it has an effect; for redundant sites, one that executes it."""
    finding: str = ""
    """The first finding in that training; for other verdicts, what differs."""
    proof: str = ""
    """
    For redundant sites. pair: dropping `partner` too gives a finding that neither gives alone. order: in no training
    did any access know less about the other streams without it. reading: `reason`, written by hand and kept.
    """
    partner: str = ""
    """A site that covers this one."""
    reason: str = ""
    """Written by hand, and kept when the list is rewritten."""


class Study:
    """Runs jobs and remembers their results."""

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory
        self._known: dict[str, dict[str, Any]] = {}
        if memory is not None and memory.exists():
            self._known = json.loads(memory.read_text(encoding="utf-8"))

    def shown(self, jobs: Iterable[Job], what: str = "runs") -> dict[Job, dict[str, Any]]:
        """The result of each job: findings of all ranks, counts of rank 0, the rest by rank."""
        wanted = list(dict.fromkeys(jobs))
        waiting: dict[int, list[Job]] = defaultdict(list)
        for job in wanted:
            if _key(job) not in self._known:
                waiting[TRAININGS[job.training].world_size].append(job)
        for world_size, todo in sorted(waiting.items()):
            for start in range(0, len(todo), BATCH):
                self._run(todo[start : start + BATCH], world_size)
                done = min(start + BATCH, len(todo))
                print(f"{what}: {done} of {len(todo)} on {world_size} ranks", file=sys.stderr, flush=True)
        return {job: self._known[_key(job)] for job in wanted}

    def _run(self, jobs: Sequence[Job], world_size: int) -> None:
        by_rank = run_on_ranks(study, jobs, world_size=world_size, device_type=SIMULATED, timeout_s=1800)
        for job, *of_ranks in zip(jobs, *by_rank, strict=True):
            merged = dict(of_ranks[0])
            merged["hazards"] = list(dict.fromkeys(line for shown in of_ranks for line in shown["hazards"]))
            merged["error"] = next((shown["error"] for shown in of_ranks if shown["error"]), "")
            merged["digest"] = [shown["digest"] for shown in of_ranks]
            merged["values"] = [
                (shown["outcome"].get("losses"), shown["outcome"].get("parameters")) for shown in of_ranks
            ]
            del merged["outcome"]
            self._known[_key(job)] = json.loads(json.dumps(merged))
        if self._memory is not None:
            self._memory.write_text(json.dumps(self._known), encoding="utf-8")


def _key(job: Job) -> str:
    return json.dumps(astuple(job))


def shows(found: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """What a run without some waits shows, compared with the run with all of them."""
    if found["hazards"]:
        return FLAGGED
    if found["error"] or found["values"] != whole["values"]:
        return NUMERICS
    if found["pending"] > whole["pending"]:
        return MEMORY
    return SAME_ORDER if found["digest"] == whole["digest"] else NOTHING


class Singles:
    """Every site dropped alone, in each training that executes it until it is flagged."""

    def __init__(self, study_: Study, names: Sequence[str]) -> None:
        self.study = study_
        whole = study_.shown([Job(name, reuse=REUSE) for name in names], "whole")
        self.whole = {job.training: found for job, found in whole.items()}
        self.sites: dict[str, list[str]] = defaultdict(list)
        """For each site, the trainings that execute it, those with the fewest ranks first."""
        for name in sorted(names, key=lambda name: TRAININGS[name].world_size):
            for site in self.whole[name]["sites"]:
                if site_from_id(site).engine in ENGINES:
                    self.sites[site].append(name)
        self.shown: dict[Job, dict[str, Any]] = {}
        self._drop()

    def _drop(self) -> None:
        """Trainings are taken one, two, four at a time, and so on: most sites are flagged in the first."""
        begin, end = 0, 1
        while waiting := [site for site, names in self.sites.items() if len(names) > begin and not self._flagged(site)]:
            jobs = [Job(name, (site,), REUSE) for site in waiting for name in self.sites[site][begin:end]]
            self.shown |= self.study.shown(jobs, f"without one of {len(waiting)} sites")
            begin, end = end, 2 * end + 1

    def _flagged(self, site: str) -> bool:
        return FLAGGED in self.by_verdict(site)

    def unclean(self) -> list[str]:
        """Trainings that show something with all their waits."""
        return [name for name, found in self.whole.items() if found["hazards"] or found["error"]]

    def by_verdict(self, site: str) -> dict[str, list[str]]:
        """The trainings that execute the site, by what dropping it shows."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.sites[site]:
            if (job := Job(name, (site,), REUSE)) in self.shown:
                found[shows(self.shown[job], self.whole[name])].append(name)
        return found


def entries(singles: Singles, known: Mapping[str, Entry]) -> list[Entry]:
    """The list. Texts that were written by hand in `known` are kept."""
    silent = [site for site in singles.sites if not singles.by_verdict(site).keys() & {*SEEN}]
    covered = partners(singles, [site for site in silent if not _is_hosts(site)])
    return sorted(
        (
            not_seen(singles, site, covered.get(site), known.get(site))
            if site in silent
            else seen(singles, site, known.get(site))
            for site in singles.sites
        ),
        key=lambda each: (each.engine, each.site),
    )


def seen(singles: Singles, site: str, known: Entry | None) -> Entry:
    """A site whose dropping has an effect."""
    found = singles.by_verdict(site)
    verdict = next(each for each in SEEN if each in found)
    training = found[verdict][0]
    without, whole = singles.shown[Job(training, (site,), REUSE)], singles.whole[training]
    finding = {
        FLAGGED: (without["hazards"] or [""])[0],
        NUMERICS: without["error"] or "losses or parameters differ",
        MEMORY: f"blocks that record_stream keeps from reuse: {without['pending']}, else {whole['pending']}",
    }[verdict]
    return Entry(
        site=site,
        engine=site_from_id(site).engine,
        verdict=verdict,
        executed_in=len(singles.sites[site]),
        training=training,
        finding=finding,
        reason=known.reason if known is not None and verdict != FLAGGED else "",
    )


def not_seen(singles: Singles, site: str, covered: Covered | None, known: Entry | None) -> Entry:
    """A site whose dropping has no effect: redundant if a run or a reading proves it."""
    # The order of accesses on the device says nothing about host memory and about reuse.
    by_order = singles.by_verdict(site).keys() == {SAME_ORDER} and _is_order(site)
    by_hand = known.proof if known is not None and known.proof == READING else ""
    proof = "pair" if covered else "order" if by_order else by_hand
    return Entry(
        site=site,
        engine=site_from_id(site).engine,
        verdict=REDUNDANT if proof else UNSEEN,
        executed_in=len(singles.sites[site]),
        training=covered.training if covered else singles.sites[site][0],
        finding=covered.finding if covered else "",
        proof=proof,
        partner=covered.partner if covered else "",
        reason=known.reason if known is not None else "",
    )


class Covered(NamedTuple):
    """A site is redundant because of another one."""

    training: str
    partner: str
    finding: str
    """A finding that needs both to be dropped."""


def partners(singles: Singles, sites: Sequence[str]) -> dict[str, Covered]:
    """What covers each site; sites that nothing covers are left out."""
    found: dict[str, Covered] = {}
    trainings = {site: _telling(singles, site) for site in sites}
    for turn in range(PAIR_TRAININGS):
        pairs = [
            (trainings[site][turn], site, other)
            for site in sites
            if site not in found and len(trainings[site]) > turn
            for other in singles.whole[trainings[site][turn]]["sites"]
            if other != site and not _is_half(site, other)
        ]
        alone = singles.study.shown([Job(name, (other,), REUSE) for name, _, other in pairs], "partners alone")
        both = singles.study.shown([Job(name, (site, other), REUSE) for name, site, other in pairs], "pairs")
        for name, site, other in pairs:
            before = alone[Job(name, (other,), REUSE)]["hazards"]
            more = [line for line in both[Job(name, (site, other), REUSE)]["hazards"] if line not in before]
            if more and site not in found:
                found[site] = Covered(name, other, more[0])
    return found


def _telling(singles: Singles, site: str) -> list[str]:
    """The trainings that execute a site, first those in which an access knows less without it."""
    found = singles.by_verdict(site)
    return [*found[NOTHING], *found[SAME_ORDER]]


def _is_hosts(site: str) -> bool:
    return site.startswith("host_waits")


def _is_order(site: str) -> bool:
    return not _is_hosts(site) and not site.startswith("record_stream")


def _is_half(site: str, other: str) -> bool:
    """Whether two sites are one call: `wait_stream` records an event and waits for it."""
    return site.partition(" ")[2] == other.partition(" ")[2]


# --- the list as a file -----------------------------------------------------------------------------------------------


def read(path: Path = LIST) -> tuple[str, dict[str, Entry]]:
    """The version of torch that the list is for, and the entries by site."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return data["torch"], {given["site"]: Entry(**given) for given in data["sites"]}


def write(found: Sequence[Entry], path: Path = LIST) -> None:
    """Write the list without empty fields."""
    lines = [
        "# What runs of torch's engines show without one of their waits. `ci/sync-sites --record` writes this file",
        "# and keeps the reasons, which are written by hand.",
        f"torch = {json.dumps(_torch_version())}",
    ]
    for each in found:
        lines += ["", "[[sites]]"]
        for field in fields(Entry):
            value = getattr(each, field.name)
            if value != "":
                lines.append(f"{field.name} = {json.dumps(value, ensure_ascii=False)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


# --- the script ---------------------------------------------------------------------------------------------


def record(memory: Path | None) -> int:
    """The whole study."""
    singles = Singles(Study(memory), list(TRAININGS))
    for name in singles.unclean():
        print(
            f"{name} has findings with all its waits: {singles.whole[name]['hazards'] or singles.whole[name]['error']}"
        )
    known = read()[1] if LIST.exists() else {}
    found = entries(singles, known)
    write(found)
    for each in found:
        if _is_unexplained(each):
            print(f"unexplained: {each.site} [{each.training}]")
    return _summary(found, bool(singles.unclean()) or any(_is_unexplained(each) for each in found))


def _is_unexplained(each: Entry) -> bool:
    return each.verdict == UNSEEN and not each.reason


def check() -> int:
    """Drop each listed site once, in the training that the list names; report sites that are not in the list."""
    _, known = read()
    study_ = Study()
    names = sorted({each.training for each in known.values()})
    whole = {job.training: found for job, found in study_.shown([Job(name, reuse=REUSE) for name in names]).items()}
    problems = [f"{name}: {site} is not in the list" for name, site in new_sites(whole, known)]
    jobs = {each.site: Job(each.training, (each.site,), REUSE) for each in known.values()}
    shown = study_.shown(jobs.values(), "without one site")
    for each in known.values():
        found = shown[jobs[each.site]]
        now = shows(found, whole[each.training])
        same = now == each.verdict if each.verdict in SEEN else now not in SEEN
        if not same:
            problems.append(f"{each.training}: {each.site}: expected {each.verdict}, got {now}")
        elif each.verdict == FLAGGED and each.finding not in found["hazards"]:
            problems.append(
                f"{each.training}: {each.site}: expected the finding {each.finding}, got {found['hazards'][0]}"
            )
    print("\n".join(problems))
    return _summary(list(known.values()), bool(problems))


def new_sites(whole: Mapping[str, Mapping[str, Any]], known: Mapping[str, Entry]) -> Iterator[tuple[str, str]]:
    """The training and the site for each executed site that is not in the list."""
    for name, found in whole.items():
        for site in found["sites"]:
            if site not in known and site_from_id(site).engine in ENGINES:
                yield name, site


def repeat(times: int) -> int:
    """Drop each flagged site many times, in fresh processes."""
    flagged = [each for each in read()[1].values() if each.verdict == FLAGGED]
    jobs = {each.site: Job(each.training, (each.site,), REUSE) for each in flagged}
    seen: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for number in range(times):
        shown = Study().shown(jobs.values(), f"repetition {number + 1}")
        for site, job in jobs.items():
            seen[site][tuple(shown[job]["hazards"])] += 1
    changing = {site: counts for site, counts in seen.items() if len(counts) > 1}
    for site, counts in changing.items():
        print(site, *(f"{count} times {list(lines)}" for lines, count in counts.items()), sep="\n    ")
    print(f"{len(jobs)} sites, {times} runs of each: {len(changing)} with findings that change")
    return 1 if changing else 0


def markdown() -> int:
    """Print the tables of the documentation, and a table of all sites."""
    version, known = read()
    found = list(known.values())
    print(f"torch {version}\n", counts_table(found), others_table(found), sites_table(found), sep="\n", end="")
    return 0


def counts_table(found: Sequence[Entry]) -> str:
    """The number of sites of each engine by verdict, with recorded events in separate rows."""
    lines = [
        "| engine | sites | flagged | numerics or memory | redundant: order | pair | reading | unseen |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows = [
        (name + (", events recorded" if records else ""), some)
        for records in (False, True)
        for engine, name in ENGINES.items()
        if (some := [each for each in found if each.engine == engine and _is_record(each) == records])
    ]
    for name, some in [*rows, ("all", list(found))]:
        verdicts, proofs = Counter(each.verdict for each in some), Counter(each.proof for each in some)
        cells = (
            *(len(some), verdicts[FLAGGED], verdicts[NUMERICS] + verdicts[MEMORY]),
            *(proofs["order"], proofs["pair"], proofs[READING], verdicts[UNSEEN]),
        )
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def others_table(found: Sequence[Entry]) -> str:
    """The sites that are not flagged, grouped by reason."""
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in found:
        if each.verdict != FLAGGED:
            by_reason[_verdict(each), _why(each, finding=False)].append(f"`{_short(each.site)}`")
    lines = ["| verdict | sites | why |", "|---|---|---|"]
    lines += [f"| {verdict} | {'<br>'.join(sites)} | {why} |" for (verdict, why), sites in sorted(by_reason.items())]
    return "\n".join(lines) + "\n"


def sites_table(found: Sequence[Entry]) -> str:
    """Every site, with its finding or the reason why it is redundant."""
    lines = ["| site | verdict | trainings | finding, or why it is redundant |", "|---|---|--:|---|"]
    lines.extend(
        f"| `{_short(each.site)}` | {_verdict(each)} | {each.executed_in} | {_why(each).replace('|', '/')} |"
        for each in found
    )
    return "\n".join(lines) + "\n"


def _verdict(each: Entry) -> str:
    return f"{each.verdict}: {each.proof}" if each.proof else each.verdict


def _why(each: Entry, *, finding: bool = True) -> str:
    if each.proof == "order":
        return "Without it, every access in every run knew just as much about all streams."
    if each.partner:
        return f"`{_short(each.partner)}` covers it." + (f" {each.finding}" if finding else "")
    return " ".join(filter(None, (each.reason, each.finding if finding else "")))


def _short(site: str) -> str:
    return site.replace("torch/distributed/fsdp/", "").replace("torch/distributed/", "").replace("torch/", "")


def _is_record(each: Entry) -> bool:
    return each.site.startswith("event_record")


def _summary(found: Sequence[Entry], bad: bool) -> int:
    counts = Counter(each.verdict for each in found)
    others = len(found) - counts[FLAGGED] - counts[REDUNDANT]
    print(f"sync-sites: {counts[FLAGGED]} flagged, {counts[REDUNDANT]} redundant, {others} others")
    return 1 if bad else 0


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="ci/sync-sites")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true")
    what.add_argument("--repeat", type=int, metavar="TIMES")
    what.add_argument("--markdown", action="store_true")
    parser.add_argument("--memory", type=Path, help="with --record: save results in this file, and resume from it")
    arguments = parser.parse_args()
    if arguments.markdown:
        return markdown()
    try:
        build.require()
    except EnvironmentUnavailable as error:
        print(f"sync-sites: {error}", file=sys.stderr)
        return 3
    if arguments.record:
        return record(arguments.memory)
    version = read()[0]
    if version != _torch_version():
        print(f"the list is for torch {version}, got {_torch_version()}: ci/sync-sites --record rewrites it")
        return 1
    return repeat(arguments.repeat) if arguments.repeat else check()


if __name__ == "__main__":
    sys.exit(main())
