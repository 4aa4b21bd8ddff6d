"""
The words of a stress run: what it provokes, and how often that struck. Standard library only.

`run --stress` runs every case as it is, on ranks where `faults.provocation` strikes. Each rank counts the strikes, its
report carries the counts to the record of the case, and `strikes_of` adds up those of a run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_conformance.outcome.records import CaseRecord

#: The key of a report's measurements that has the counts of its rank.
MEASUREMENT = "stress"

#: The key of a record's measurements that says where a rank was made to fail; empty if it never came there.
STRUCK = "stress failure"

#: A measurement of a rank whose case took an exception for a refusal after the rank had been made to fail.
SWALLOWED = "injected failure taken for a refusal"

#: The seed of a run whose user names none.
DEFAULT_SEED = 1


class Provocation(StrEnum):
    """The ways in which a stress run disturbs a rank."""

    LATE = "late completion"
    """The outputs of an asynchronous collective come with its own `wait()`, and no earlier."""
    OVERTAKEN = "completion out of order"
    """A collective completed while one that was issued before it had not."""
    POISONED = "poisoned output"
    """An output held poison from the issue of its collective until it completed."""
    READ_LATE = "input read late"
    """A collective's input was not read at its issue, but when the rank next waited for anything."""
    SLOW = "slow rank"
    """One rank of the case slept before a collective."""
    FREED = "freed memory poisoned"
    """The bytes of a storage were overwritten before they were freed."""
    NEW = "new memory poisoned"
    """A storage grew by bytes of poison, or a new buffer full of poison was met as the output of a collective."""


class Failure(StrEnum):
    """How a stress run with `--stress-failure` makes one rank of each case fail."""

    RAISE = "raise"
    """It raises an exception."""
    COLLECTIVE = "collective"
    """One of its collectives fails: waiting for it raises what a backend raises."""
    EXIT = "exit"
    """Its process exits."""
    KILL = "kill"
    """Its process is killed, by SIGKILL."""
    STOP = "stop"
    """Its process is stopped, by SIGSTOP, and never continues."""


#: In place of a failure: another one for each case, as the seed has it.
ANY = "any"

#: The exit status of a rank that exits as an injected failure.
EXIT_CODE = 7


def failure_of(word: str, seed: int, case: str) -> Failure:
    """The failure of a case in a run with that word."""
    return Failure(word) if word != ANY else random.Random(f"{seed} {case} which failure").choice(list(Failure))


def strikes_of(records: Iterable[CaseRecord]) -> dict[Provocation, int]:
    """How often each provocation struck, on all ranks of all cases. One that never struck has 0."""
    total = dict.fromkeys(Provocation, 0)
    for record in records:
        for counts, num_ranks in _counts_of(record):
            for provocation in Provocation:
                total[provocation] += num_ranks * int(counts.get(provocation, 0))
    return total


def _counts_of(record: CaseRecord) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The sets of counts of a record, each with the number of ranks that have it."""
    measured = record.measurements.get(MEASUREMENT)
    if not isinstance(measured, Mapping):
        return
    by_rank = [value for value in measured.values() if isinstance(value, Mapping)]
    if by_rank:
        yield from ((counts, 1) for counts in by_rank)
    else:
        # The ranks that reported agree (`judge.verdicts`).
        yield measured, sum(end.reported for end in record.exits)


def in_words(total: Mapping[Provocation, int]) -> str:
    """ "late completion 120 times, slow rank 12 times; never struck: completion out of order"."""
    struck = ", ".join(f"{name} {count} times" for name, count in total.items() if count) or "nothing struck"
    silent = ", ".join(name for name, count in total.items() if not count)
    return struck + (f"; never struck: {silent}" if silent else "")
