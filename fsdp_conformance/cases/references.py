"""
The references of a case: trained, or taken from the store of references.

    CaseReferences  the references that a case has trained or read so far
    _Source         where references of one scenario come from, and go to

Only a referee uses the store: no code under test has entered it. A case on ranks that judge alone trains its references
itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fsdp_conformance import codec
from fsdp_conformance.cases.rank import CaseRank
from fsdp_conformance.errors import ReferencesDisagree, SuiteError
from fsdp_conformance.harness.processes import preload
from fsdp_conformance.harness.recording import process_group
from fsdp_conformance.outcome.records import REFERENCES, RankReport
from fsdp_conformance.references.reference_set import References, from_histories, train_references
from fsdp_conformance.references.scenario import NotShared, scenario_sha256
from fsdp_conformance.references.sharing import Offer, is_untouched
from fsdp_conformance.references.store import Refused, content_of, entry_name, section
from fsdp_conformance.workload.definition import Regime, Workload

#: How references were obtained, in the order of `RankReport.measurements`.
COMPUTED, SHARED, CHECKED = "computed", "shared", "checked"


class CaseReferences:
    """The references of a case, on one rank. `offer` is the store as the controller offers it; None: share nothing."""

    def __init__(self, here: CaseRank, offer: Mapping[str, Any] | None) -> None:
        self._here = here
        self._offer = offer
        self._trained: dict[Hashable, tuple[Workload, References]] = {}
        """Workload and references by their content, so that a case with several checks trains them once."""

    def of(self, workload: Workload, regime: Regime | None = None) -> References:
        """The references for the workload, in agreement. Collective, once per workload and regime."""
        regime = (regime or Regime()).for_references()
        identity = _identity(workload, regime)
        if identity not in self._trained:
            with process_group.log().phase("observe"), self._here.blaming("suite"):
                self._trained[identity] = workload, self._source(workload, regime).obtained()
        return self._trained[identity][1]

    def use(self, workload: Workload, regime: Regime, references: References) -> None:
        """Take references that this process has already trained for the workload and regime."""
        self._trained[_identity(workload, regime.for_references())] = workload, references

    def forget(self) -> None:
        """Forget the references that were trained or read."""
        self._trained.clear()

    def _source(self, workload: Workload, regime: Regime) -> _Source:
        here = self._here
        return _Source(
            case=here.case.id,
            workload=workload,
            regime=regime,
            rank=here.rank,
            world_size=here.world_size,
            device=here.reference_device,
            report=here.report,
            offer=None if self._offer is None else codec.typed(Offer, self._offer),
        )


def _identity(workload: Workload, regime: Regime) -> Hashable:
    """
    Equal for two workloads only if they train the same.

    The name does not tell: a case may train one workload and compare with another that has the same name, because it
    changes values after wrapping.
    """
    try:
        return scenario_sha256(workload, regime)
    except NotShared:
        return id(workload), regime


@dataclass(kw_only=True, slots=True)
class _Source:
    """Where the references of one workload and regime come from, on one rank."""

    case: str
    workload: Workload
    regime: Regime
    rank: int
    world_size: int
    device: str
    report: RankReport
    offer: Offer | None
    key: dict[str, str] | None = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = None if self.offer is None else self.offer.key(self.workload, self.regime, self.world_size)
        self.name = "" if self.key is None else entry_name(self.key)

    def _is_sampled(self) -> bool:
        """True if there is an entry, and this case trains it again."""
        if self.offer is None or self.key is None or self.name not in self.offer.known:
            return False
        return self.offer.is_sampled(self.case, self.key)

    def obtained(self) -> References:
        """
        Return the references: from the store if every rank finds them there, otherwise trained, and then written to the
        store if every rank may write. Collective.

        A sample of the entries is trained again: raises SuiteError if that gives other references.
        """
        if self.offer is None:
            return self._computed()
        if self._is_sampled():
            return self._checked()
        references = self._read()
        if self._everywhere(references is not None) and references is not None:
            self._count(SHARED)
            return references
        references = self._computed()
        may_write = self.key is not None and self.name not in self.offer.known and self._is_untouched()
        if self._everywhere(may_write) and self.key is not None:
            self._leave(self.offer, self.key, references)
        return references

    def _checked(self) -> References:
        """The references, trained here and compared with the entry, bit for bit. Collective."""
        references = self._computed()
        entry = self._bytes()
        is_same = entry is None or entry == _section(references)
        if entry is not None:
            self._count(CHECKED)
        if not self._everywhere(is_same) and self.offer is not None:
            self.offer.store.remove(self.name)
            raise SuiteError(
                f"shared references {self.offer.store.path(self.name)}: expected what the ranks train, got "
                f"{'other values on some other rank' if is_same else 'other values'} "
                f"[rank {self.rank}, {self.workload.name}, world size {self.world_size}]. "
                "The entry was removed: run the case again."
            )
        return references

    def _is_untouched(self) -> bool:
        """True if this process has imported nothing but the suite."""
        return not preload.failures and is_untouched(preload.loaded)

    def _computed(self) -> References:
        references = train_references(
            self.workload, self.regime, rank=self.rank, world_size=self.world_size, device=self.device
        )
        references.agree()
        self._count(COMPUTED)
        return references

    def _read(self) -> References | None:
        """This rank's part of the entry; None if there is none. An entry with invalid content is removed."""
        data = self._bytes()
        if data is None:
            return None
        try:
            content: Any = content_of(data)
            references = from_histories(
                self.workload,
                self.regime,
                rank=self.rank,
                world_size=self.world_size,
                histories=content["histories"],
                absent=content["absent"],
            )
            references.agree()
        except (Refused, SuiteError, ReferencesDisagree, KeyError, TypeError, AttributeError) as refused:
            self._refuse(refused)
            return None
        return references

    def _bytes(self) -> bytes | None:
        """The bytes of this rank's part of the entry; None if there is none, or if it was refused."""
        if self.offer is None or self.key is None or self.name not in self.offer.known:
            return None
        try:
            return self.offer.store.read(self.key, self.rank)
        except Refused as refused:
            self._refuse(refused)
            return None

    def _refuse(self, reason: Exception) -> None:
        if self.offer is not None:
            self.offer.store.remove(self.name)
            path = self.offer.store.path(self.name)
            self.report.notes.append(f"shared references {path} were refused and removed: {reason}")

    def _leave(self, offer: Offer, key: Mapping[str, str], references: References) -> None:
        """Write the entry. Collective."""
        try:
            own_section: bytes | None = _section(references)
        except NotShared:
            own_section = None
        gathered: list[bytes | None] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(own_section, gathered)
        sections = [data for data in gathered or () if data is not None]
        if self.rank == 0 and len(sections) == self.world_size:
            offer.store.write(key, sections)

    def _everywhere(self, holds: bool) -> bool:
        """True if it holds on every rank, and all look for the same entry. Collective."""
        number = int(self.name[:15] or "0", 16)
        least = torch.tensor([holds, number, -number], dtype=torch.int64, device="cpu")
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        everywhere, lowest, highest = least.tolist()
        return bool(everywhere) and lowest == -highest

    def _count(self, how: str) -> None:
        counts = self.report.measurements.setdefault(REFERENCES, {COMPUTED: 0, SHARED: 0, CHECKED: 0})
        counts[how] += 1


def _section(references: References) -> bytes:
    """One rank's part of an entry."""
    return section(references.histories, references.absent)
