"""How many known-wrong engines `explore` finds, without the cases that were written for them: see ci/explore-power."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.contract.gate import empty_record
from fsdp_conformance.errors import AdapterError, ConformanceError, NotExact
from fsdp_conformance.explore.case import case_for
from fsdp_conformance.explore.exploration import Budget, Explorer
from fsdp_conformance.explore.pool import Outcome, outcome_of
from fsdp_conformance.explore.signature import signature_of
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.mutants import ALL, MUTANTS, Mutant
from fsdp_conformance.mutants.mutant import Symptom
from fsdp_conformance.outcome.records import case_record_from_json
from fsdp_conformance.run_settings import RunOrder, RunSettings
from fsdp_conformance.scenarios.scenario import Scenario
from fsdp_conformance.verdict import Verdict
from studies.explore_reach import out_of_reach

#: One known-wrong engine in this many is hidden.
HIDDEN = 3


#: Modules whose classes are correct engines with seams, from which mutants derive.
_SEAMS = ("fsdp_conformance.mutants.base", "fsdp_conformance.mutants.engines", "fsdp_conformance.adapters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result for one known-wrong engine."""

    mutant: str
    found: bool
    ran: int
    """Scenarios until it was found, or in all."""
    signature: str = ""
    features: tuple[str, ...] = ()
    scenario: str = ""
    """The scenario that found it, as JSON."""
    own: tuple[str, ...] = ()
    """How the engine failed that is also how it fails without the defect."""
    unjudged: dict[str, int] = field(default_factory=dict)
    """Scenarios that judged nothing, by reason."""
    how: str = ""
    """Why there is no answer."""
    seconds: float = 0.0


# --- one scenario in its own process --------------------------------------------------------------------------------


class Fork:
    """
    Runs scenarios on simulated ranks, each in a fork of this process: whatever an engine does to it, the next one is
    fresh.
    """

    def __init__(self, spec: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._order = _order(spec)

    def run(self, scenario: Scenario) -> Outcome:
        """Run a scenario."""
        answer, ending = in_fork(partial(_record_of, self._order, scenario), self.timeout_s)
        if answer is None:
            record = empty_record(case_for(scenario), self._order.settings, self._order.device)
            record.verdict = Verdict.HANG if ending == "hung" else Verdict.CRASH
            return Outcome(record=record)
        if "rejected" in answer:
            return Outcome(rejected=answer["rejected"])
        try:
            return outcome_of(case_record_from_json(answer["record"]), 0.0)
        except ConformanceError as error:
            return Outcome(rejected=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}")


class Forks:
    """Runs scenarios with a defect, and those that fail also without it: what fails then, too, is not the defect's."""

    def __init__(self, spec: str, correct: str, timeout_s: float, *, counts_ends: bool) -> None:
        self.counts_ends = counts_ends
        """True if a crash or a hang counts as the defect; otherwise the machine may have caused it."""
        self.own: list[str] = []
        self.wrong, self.correct = Fork(spec, timeout_s), Fork(correct, timeout_s)

    def run(self, scenario: Scenario) -> Outcome:
        """Run a scenario."""
        outcome = self.wrong.run(scenario)
        if not outcome.failed:
            return outcome
        assert outcome.record is not None, "what failed has a record"
        if outcome.record.verdict in (Verdict.CRASH, Verdict.HANG) and not self.counts_ends:
            return Outcome(rejected=f"{outcome.record.verdict.value}, which is not how the defect shows")
        if self.correct.run(scenario).failed:
            self.own.append(str(signature_of(outcome)))
            return Outcome(rejected="fails without the defect, too")
        return outcome


def in_fork(body: Callable[[], dict[str, Any]], timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """Call a function in a fork. Returns its result, or None and how the fork ended: "hung", or its status."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            os.setsid()
            os.close(reading)
            with os.fdopen(writing, "w", encoding="utf-8") as file:
                json.dump(body(), file)
            status = 0
        os._exit(status)
    os.close(writing)
    text, hung = _read_all(reading, timeout_s)
    os.close(reading)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if hung:
        return None, "hung"
    try:
        return dict(json.loads(text)), ""
    except ValueError:
        return None, f"ended with {os.waitstatus_to_exitcode(status)}"


def _read_all(descriptor: int, timeout_s: float) -> tuple[bytes, bool]:
    """Read until the other side closes. The second value is True if that took too long."""
    data, until = b"", time.monotonic() + timeout_s
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return data, True
        part = os.read(descriptor, 1 << 16)
        if not part:
            return data, False
        data += part


def _record_of(order: RunOrder, scenario: Scenario) -> dict[str, Any]:
    from fsdp_conformance.explore.worker import run_scenario

    try:
        record, _ = run_scenario(scenario, order)
    except NotExact:
        return {"rejected": "not exact: the mantissa is used up"}
    except Exception as error:  # noqa: BLE001 - it goes to the parent
        return {"rejected": f"{type(error).__name__}: {traceback.format_exc()[-300:]}"}
    return {"record": record.to_json()}


def _order(spec: str) -> RunOrder:
    return RunOrder(
        settings=RunSettings(implementation=spec, ranks="simulated"),
        description=codec.plain(registry.describe_here(spec)),
        device="cpu",
    )


# --- one engine -------------------------------------------------------------------------------------------------------


def hidden(mutants: Iterable[Mutant] = ALL, modulus: int = HIDDEN) -> list[Mutant]:
    """The known-wrong engines whose cases count as unwritten: the same ones on every machine."""
    chosen = [m for m in mutants if int(hashlib.sha256(m.name.encode()).hexdigest(), 16) % modulus == 0]
    return sorted(chosen, key=lambda mutant: hashlib.sha256(mutant.name.encode()).hexdigest())


def class_of(mutant: Mutant) -> str:
    """The class of a defect: the module that it is written in."""
    return mutant.spec.partition(":")[0].rpartition(".")[2]


def without_defect(mutant: Mutant) -> str:
    """The spec of the engine that a known-wrong one derives from. Raises AdapterError if it derives from none."""
    for base in registry.load(mutant.spec).__mro__[1:]:
        if base.__module__.startswith(_SEAMS) and not getattr(base, "__abstractmethods__", None):
            return f"{base.__module__}:{base.__qualname__}"
    raise AdapterError(f"{mutant.spec} must derive from an engine that can be run, got none")


def known_of(spec: str, examples: int, timeout_s: float) -> list[frozenset[str]]:
    """
    Sets of values that make an engine fail without a defect, or that it avoids.

    Torch's engines have some, and they would hide a defect: few scenarios have none of them.
    """
    description = registry.describe_here(spec)
    avoided = [frozenset(f"{axis}: {value}" for axis, value in values.items()) for values in description.avoids]
    budget = Budget(max_examples=examples)
    explorer = Explorer(Fork(spec, timeout_s), description.declared("cpu"), budget, known=avoided)
    explorer.explore()
    return explorer.avoided


def tried(mutant: Mutant, examples: int, timeout_s: float, known: Iterable[frozenset[str]] = ()) -> Answer:
    """Explore one engine, with a budget of scenarios. `known`: what fails without the defect, and is not drawn."""
    began = time.monotonic()
    try:
        forks = Forks(
            mutant.spec,
            without_defect(mutant),
            timeout_s,
            counts_ends=bool({Symptom.HANG, Symptom.CRASH} & set(mutant.shows)),
        )
        declared = registry.describe_here(mutant.spec).declared("cpu")
        budget = Budget(max_examples=examples)
        exploration = Explorer(forks, declared, budget, max_shrinks=0, max_failures=1, known=known).explore()
    except ConformanceError as error:
        return Answer(mutant=mutant.name, found=False, ran=0, how=f"{type(error).__name__}: {error}"[:300])
    common: dict[str, Any] = {
        "mutant": mutant.name,
        "ran": exploration.ran,
        "own": tuple(sorted(set(forks.own))),
        "unjudged": dict(exploration.rejected + Counter(declined=sum(exploration.declined.values()))),
        "seconds": round(time.monotonic() - began, 1),
    }
    if not exploration.failures:
        return Answer(found=False, **common)
    failure = exploration.failures[0]
    return Answer(
        found=True,
        signature=str(failure.signature),
        features=tuple(sorted(failure.drawn.features)),
        scenario=failure.drawn.to_json(),
        **common,
    )


# --- the study --------------------------------------------------------------------------------------------------------


def main(words: list[str] | None = None) -> int:
    """Try every hidden engine within reach that FILE has not, and print the figures."""
    parser = argparse.ArgumentParser(prog="ci/explore-power")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE")
    parser.add_argument("--max-examples", type=int, default=60, metavar="N", help="for each engine")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one scenario, until it has hung")
    parser.add_argument("--limit", type=int, metavar="N", help="try only so many engines in this run")
    parser.add_argument("--only", action="append", metavar="NAME", help="try this engine, hidden or not")
    parser.add_argument("--only-read", action="store_true")
    given = parser.parse_args(words)
    unknown = sorted(set(given.only or ()) - set(MUTANTS))
    if unknown:
        parser.error(f"--only must name known-wrong engines, got {', '.join(unknown)}")
    answers = read(given.output, given.max_examples)
    chosen = [MUTANTS[name] for name in given.only] if given.only else hidden()
    left = [mutant for mutant in chosen if mutant.name not in answers and not out_of_reach(mutant)]
    if not given.only_read:
        process_group.register_recording_backend("cpu")
    known = read_known(given.output)
    for mutant in [] if given.only_read else left[: given.limit]:
        correct = without_defect(mutant)
        if correct not in known:
            known[correct] = known_of(correct, given.max_examples, given.timeout)
            line = {"correct": correct, "known": [sorted(features) for features in known[correct]]}
            with given.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"known   {correct:<40} {len(known[correct]):>3}", flush=True)
        answer = tried(mutant, given.max_examples, given.timeout, known[correct])
        if not answer.how:
            answers[answer.mutant] = answer
        with given.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(answer), "budget": given.max_examples}) + "\n")
        word = "found" if answer.found else "NOTHING" if answer.how else "MISSED"
        print(f"{word:<8}{answer.mutant:<40} {answer.ran:>3} {answer.signature or answer.how}", flush=True)
    print(figures(answers, hidden()))
    return 0


def figures(known: Mapping[str, Answer], mutants: Iterable[Mutant]) -> str:
    """How many hidden engines were found, by class, how soon, and which were not or cannot be, and why."""
    mutants = list(mutants)
    reach = [mutant for mutant in mutants if not out_of_reach(mutant)]
    answers = {mutant.name: known[mutant.name] for mutant in reach if mutant.name in known}
    numbers = sorted(answer.ran for answer in answers.values() if answer.found)
    lines = [
        f"{len(mutants)} known-wrong engines are hidden, {len(reach)} of them within reach",
        f"{len(numbers)} of the {len(answers)} that were tried were found",
    ]
    if numbers:
        lines.append(f"scenarios until then: half within {numbers[(len(numbers) - 1) // 2]}, all within {numbers[-1]}")
    lines.append(f"{'class':<20}{'found':>8}{'missed':>8}{'untried':>9}{'out of reach':>14}")
    for name in sorted({class_of(mutant) for mutant in mutants}):
        of = [mutant for mutant in mutants if class_of(mutant) == name]
        counts = Counter(_fate(mutant, answers) for mutant in of)
        lines.append(
            f"{name:<20}{counts['found']:>8}{counts['missed']:>8}{counts['untried']:>9}{counts['out of reach']:>14}"
        )
    lines += [
        f"missed: {mutant.name} ({mutant.defect} {answers[mutant.name].ran} scenarios)"
        for mutant in reach
        if _fate(mutant, answers) == "missed"
    ]
    reasons = Counter(reason for mutant in mutants if (reason := out_of_reach(mutant)))
    lines += [f"out of reach: {count} ({reason})" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _fate(mutant: Mutant, answers: Mapping[str, Answer]) -> str:
    if out_of_reach(mutant):
        return "out of reach"
    if mutant.name not in answers:
        return "untried"
    return "found" if answers[mutant.name].found else "missed"


def read(path: Path, examples: int) -> dict[str, Answer]:
    """
    The answers of a file. One that found nothing with a smaller budget, or no answer at all, is left out, so that the
    engine is tried again.
    """
    if not path.exists():
        return {}
    answers: dict[str, Answer] = {}
    for data in _lines(path):
        if "mutant" not in data:
            continue
        budget = data.pop("budget")
        if not data["how"] and (data["found"] or budget >= examples):
            answers[data["mutant"]] = Answer(**{**data, "features": tuple(data["features"]), "own": tuple(data["own"])})
    return answers


def read_known(path: Path) -> dict[str, list[frozenset[str]]]:
    """Sets of values that make engines fail without a defect, by spec, as a file has them."""
    lines = _lines(path) if path.exists() else []
    return {data["correct"]: [frozenset(features) for features in data["known"]] for data in lines if "correct" in data}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())
