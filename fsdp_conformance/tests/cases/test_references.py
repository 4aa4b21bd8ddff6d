"""Where the references of a case come from, on a world of one rank in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fsdp_conformance.cases.references import _section, _Source
from fsdp_conformance.fixtures import models, probes
from fsdp_conformance.outcome.records import REFERENCES, RankReport
from fsdp_conformance.references.sharing import Offer
from fsdp_conformance.references.store import content_of, section
from fsdp_conformance.workload.definition import Regime, Workload


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which entries are trained again is drawn for each run."""
    monkeypatch.setattr(Offer, "is_sampled", lambda self, case, key: False)


def _source(directory: Path, *, workload: Workload | None = None) -> _Source:
    """The offer is made again, as for another case."""
    offer = Offer(directory=str(directory), limit=2**30, origin={}, run="", known=frozenset())
    return _Source(
        case="R001/exact-probe-ws2",
        workload=workload or probes.exact_mlp(),
        regime=Regime(steps=1),
        rank=0,
        world_size=1,
        device="cpu",
        report=RankReport(rank=0),
        offer=replace(offer, known=offer.store.names()),
    )


def _counts(source: _Source) -> tuple[int, ...]:
    return tuple(source.report.measurements[REFERENCES].values())


def _suffixes(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir())


@pytest.mark.parametrize("workload", [probes.exact_mlp(), models.norm_mlp()], ids=lambda workload: workload.name)
def test_written_and_taken(tmp_path: Path, workload: Workload) -> None:
    """By the first case that needs them, and by all after it; the same bits each time."""
    writes = _source(tmp_path, workload=workload)
    trained = writes.obtained()
    assert (_counts(writes), _suffixes(tmp_path)) == ((1, 0, 0), [".references"])

    takes = _source(tmp_path, workload=workload)
    takes.offer = replace(takes.offer, run=_unsampled(takes)) if takes.offer is not None else None
    obtained = takes.obtained()
    assert _counts(takes) == (0, 1, 0)
    assert _section(obtained) == _section(trained)


def _unsampled(source: _Source) -> str:
    """A run in which the case does not train the entry again."""
    assert source.offer is not None
    assert source.key is not None
    offers = (replace(source.offer, run=str(number)) for number in range(1000))
    return next(offer.run for offer in offers if not offer.is_sampled(source.case, source.key))


def test_an_entry_whose_references_disagree_is_refused(tmp_path: Path) -> None:
    """It has the right hashes, but no case could have written it: it is removed, and judges no engine."""
    writes = _source(tmp_path)
    writes.obtained()
    assert writes.offer is not None
    assert writes.key is not None
    content = content_of(writes.offer.store.read(writes.key, 0) or b"")
    content["histories"]["all-reduce"].steps[0].params["0.weight"] += 1.0
    writes.offer.store.write(writes.key, [section(**content)])

    takes = _source(tmp_path)
    takes.obtained()

    assert _counts(takes) == (1, 0, 0)
    assert "parameter '0.weight'" in takes.report.notes[0]
    assert _suffixes(tmp_path) == []


def test_without_a_store(tmp_path: Path) -> None:
    """Without a store, everything is trained, and counted."""
    source = _source(tmp_path)
    source.offer = None

    source.obtained()

    assert (_counts(source), list(tmp_path.iterdir())) == ((1, 0, 0), [])
