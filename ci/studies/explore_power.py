"""How many known-wrong engines `explore` finds, without the cases that were written for them: see ci/explore-power."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_conformance.adapters import registry
from fsdp_conformance.config import RunSettings
from fsdp_conformance.errors import NotExact
from fsdp_conformance.explore.example import Example, features
from fsdp_conformance.explore.exploration import Budget, Explorer
from fsdp_conformance.explore.pool import Outcome, outcome_of
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.mutants import MUTANTS, Mutant
from fsdp_conformance.settings import RunOrder

#: Engines that train through the whole protocol. The others are components, which no drawn model reaches.
TRAINED = frozenset({"torch-fsdp2", "torch-fsdp1", "torch-ddp", "reference", "deepspeed-zero3"})

#: One known-wrong engine in this many is hidden.
HIDDEN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of one known-wrong engine."""

    mutant: str
    found: bool
    ran: int
    """Examples until it was found, or in all."""
    signature: str = ""
    features: tuple[str, ...] = ()
    how: str = ""
    """How the process ended, if it did not answer."""
    seconds: float = 0.0


class InThisProcess:
    """Runs examples on simulated ranks in this process, which is a fork made for one engine."""

    def __init__(self, order: RunOrder) -> None:
        self.order = order
        process_group.register_recording_backend(order.device)

    def run(self, example: Example) -> Outcome:
        """Run an example."""
        from fsdp_conformance.explore.worker import run_example

        try:
            record, _ = run_example(example, self.order)
        except NotExact:
            return Outcome(rejected="not exact")
        return outcome_of(record, 0.0)


def hidden(modulus: int = HIDDEN) -> list[Mutant]:
    """The known-wrong engines whose cases count as unwritten: the same ones on every machine."""
    chosen = [name for name in MUTANTS if int(hashlib.sha256(name.encode()).hexdigest(), 16) % modulus == 0]
    return [MUTANTS[name] for name in chosen if MUTANTS[name].engine in TRAINED]


def tried(mutant: Mutant, examples: int, timeout_s: float) -> Answer:
    """Explore one engine in a fork of this process. A fork that dies, or takes too long, gives no answer."""
    began = time.monotonic()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        status = 1
        with suppress(BaseException):
            os.write(writing, json.dumps(_explored(mutant, examples)).encode())
            status = 0
        os._exit(status)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], timeout_s)
    said = os.read(reading, 1 << 16) if ready else b""
    os.close(reading)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    if said:
        return Answer(mutant=mutant.name, seconds=seconds, **json.loads(said))
    how = "hung" if not ready else f"ended with {os.waitstatus_to_exitcode(status)}"
    return Answer(mutant=mutant.name, found=False, ran=0, how=how, seconds=seconds)


def _explored(mutant: Mutant, examples: int) -> dict[str, Any]:
    description = registry.describe_here(mutant.spec)
    order = RunOrder(
        settings=RunSettings(implementation=mutant.spec, ranks="simulated"),
        description=description.to_json(),
        device="cpu",
    )
    found = Explorer(
        InThisProcess(order), description.declared("cpu"), Budget(max_examples=examples), max_shrinks=0, max_failures=1
    ).explore()
    if not found.failures:
        return {"found": False, "ran": found.ran}
    failure = found.failures[0]
    return {
        "found": True,
        "ran": found.ran,
        "signature": str(failure.signature),
        "features": sorted(features(failure.drawn)),
    }


def main() -> int:
    """Try every hidden engine that FILE has not, and print the figures."""
    parser = argparse.ArgumentParser(prog="ci/explore-power")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE")
    parser.add_argument("--max-examples", type=int, default=60, metavar="N")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for each engine")
    parser.add_argument("--limit", type=int, metavar="N", help="try only so many engines in this run")
    parser.add_argument("--only-read", action="store_true")
    given = parser.parse_args()
    known = _read(given.output)
    left = [mutant for mutant in hidden() if mutant.name not in known]
    for mutant in [] if given.only_read else left[: given.limit]:
        answer = tried(mutant, given.max_examples, given.timeout)
        known[answer.mutant] = answer
        with given.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answer)) + "\n")
        word = "found" if answer.found else "MISSED"
        print(f"{word:<7} {answer.mutant:<40} {answer.ran:>3} {answer.signature or answer.how}", flush=True)
    print(figures(known, total=len(hidden())))
    return 0


def figures(known: dict[str, Answer], *, total: int) -> str:
    """How many were found, how soon, and which were not."""
    found = sorted(answer.ran for answer in known.values() if answer.found)
    missed = sorted(answer.mutant for answer in known.values() if not answer.found and not answer.how)
    lines = [f"{len(found)} of {len(found) + len(missed)} hidden known-wrong engines found ({total} are hidden)"]
    lines += [f"without an answer: {answer.mutant} ({answer.how})" for answer in known.values() if answer.how]
    if found:
        lines.append(f"examples until then: half within {found[len(found) // 2]}, all within {found[-1]}")
    return "\n".join([*lines, *(f"missed: {name}" for name in missed)])


def _read(path: Path) -> dict[str, Answer]:
    if not path.exists():
        return {}
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # One that gave no answer, on a busy machine for example, is tried again.
    return {
        data["mutant"]: Answer(**{**data, "features": tuple(data["features"])}) for data in answers if not data["how"]
    }


if __name__ == "__main__":
    raise SystemExit(main())
