"""
Which references a case may take from the store, and which ranks may write there: the rules of `references.store`.

    Offer       the store as the controller describes it to the ranks of a case, the same on every rank
    offered     makes the offer; None if sharing is switched off
    is_untouched    true if nothing but the suite and torch has been imported in the warm process
    is_of_suites    true for modules of our cases

An entry outlives the run, and judges other engines. So only a rank that no engine's code has entered may write one: an
engine that changes torch would otherwise change what others are compared with. And a sample of what could be taken is
trained again, on such ranks, and compared bit for bit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.references.scenario import NotShared, machine, scenario_sha256, surroundings
from fsdp_conformance.references.store import ReferenceStore, entry_name
from fsdp_conformance.run_settings import REFERENCES_LIMIT, REFERENCES_STORE
from fsdp_conformance.workload.definition import Regime, Workload

#: The store's size in MiB, unless the variable says otherwise.
_LIMIT_MB = 512

#: One in this many of the entries that a case could use is trained again.
SPOT_CHECKS = 16

#: Modules of the suite that are, or hold, code under test.
_UNDER_TEST = ("fsdp_conformance.mutants", "fsdp_conformance.tests")
#: Packages that a warm process may have imported and still be the suite's own.
_HARMLESS = frozenset({"torch", "numpy", "unittest", "pytest", "parameterized", "expecttest", "fsdp_conformance"})

#: The name of a run that has no directory.
_RUN = secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The store as it was when the case began, so that all of its ranks decide the same."""

    directory: str
    limit: int
    origin: Mapping[str, str]
    """The part of a key that the controller knows: the suite's hash and the machine."""
    run: str
    known: frozenset[str]
    """The names of the entries that exist."""
    secret: str = ""
    """In a referee: the run's secret, if the run takes only entries of its own referees. Ranks never get it."""

    @property
    def store(self) -> ReferenceStore:
        """The store that it offers."""
        return ReferenceStore(Path(self.directory), self.limit, self.secret)

    def key(self, workload: Workload, regime: Regime, world_size: int) -> dict[str, str] | None:
        """The key of the references, from all that they depend on; None if they are not shared."""
        try:
            scenario = scenario_sha256(workload, regime)
        except NotShared:
            return None
        return {
            **self.origin,
            **surroundings(),
            "workload": workload.name,
            "scenario": scenario,
            "world_size": str(world_size),
        }

    def is_sampled(self, case: str, key: Mapping[str, str]) -> bool:
        """True if this case of this run trains the entry's references again."""
        digest = hashlib.sha256(f"{self.run}\n{case}\n{entry_name(key)}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % SPOT_CHECKS == 0


def offered(suite_sha256: str, cache: Path, *, run: str | None = None, secret: str = "") -> Offer | None:
    """
    The store that the environment names: in the variable's directory, or in `cache`; None if it is "off".

    With a secret, the run uses separate entries. The offer does not hold the secret: see `Offer.secret`.

    Raises ConfigError for a limit that is no number.
    """
    setting = os.environ.get(REFERENCES_STORE, "")
    if setting == "off":
        return None
    directory = Path(setting).absolute() if setting else cache / "references"
    limit = _limit()
    return Offer(
        directory=str(directory),
        limit=limit,
        origin={"suite": suite_sha256, **machine(), **_own_entries(secret)},
        run=run or _RUN,
        known=ReferenceStore(directory, limit).names(),
    )


def _own_entries(secret: str) -> dict[str, str]:
    """The part of a key that tells the entries of runs apart."""
    return {"run": hashlib.sha256(secret.encode()).hexdigest()} if secret else {}


def is_untouched(imported: Iterable[str]) -> bool:
    """True if these modules, which the warm process has imported, are the suite's own and torch's."""
    return all(
        (name.partition(".")[0] in _HARMLESS and not name.startswith(_UNDER_TEST) and "/" not in name)
        or is_of_suites(name)
        for name in imported
    )


def is_of_suites(name: str) -> bool:
    """
    True if an imported module is one of our cases, by its file: in a checkout, pytest imports it as `suites.NAME`.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and Path(file).resolve().parent in _places_of_suites()


@functools.cache
def _places_of_suites() -> frozenset[Path]:
    spec = importlib.util.find_spec("fsdp_conformance.suites")
    places = spec.submodule_search_locations if spec is not None else None
    return frozenset(Path(place).resolve() for place in places or ())


def _limit() -> int:
    setting = os.environ.get(REFERENCES_LIMIT, str(_LIMIT_MB))
    if not setting.isdecimal():
        raise ConfigError([f"{REFERENCES_LIMIT} must be a number of MiB, got {setting!r}"], where="environment")
    return int(setting) * 2**20
