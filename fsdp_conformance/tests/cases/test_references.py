"""Where the references of a case come from, on a world of one rank in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
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


def _source(directory: Path, *, fresh: bool = True, workload: Workload | None = None) -> _Source:
    """The offer is made again, as for another case."""
    offer = Offer(directory=str(directory), limit=2**30, origin={}, run="", known=frozenset(), wanted=frozenset())
    known, wanted = offer.store.names()
    return _Source(
        workload=workload or probes.exact_mlp(),
        regime=Regime(steps=1),
        rank=0,
        world_size=1,
        device="cpu",
        report=RankReport(rank=0),
        offer=replace(offer, known=known, wanted=wanted),
        fresh=fresh,
    )


def _counts(source: _Source) -> tuple[int, ...]:
    return tuple(source.report.measurements[REFERENCES].values())


def _suffixes(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir())


@pytest.mark.parametrize("workload", [probes.exact_mlp(), models.norm_mlp()], ids=lambda workload: workload.name)
def test_marked_written_taken(tmp_path: Path, workload: Workload) -> None:
    """By a case whose engine has run, by one whose engine has not, and by all after it; the same bits each time."""
    marks = _source(tmp_path, fresh=False, workload=workload)
    trained = marks.obtained()
    assert (_counts(marks), _suffixes(tmp_path), marks.is_wanted()) == ((1, 0, 0), [".wanted"], False)

    writes = _source(tmp_path, workload=workload)
    assert writes.is_wanted()
    writes.obtained()
    assert (_counts(writes), _suffixes(tmp_path)) == ((1, 0, 0), [".references"])

    takes = _source(tmp_path, fresh=False, workload=workload)
    obtained = takes.obtained()
    assert (_counts(takes), takes.is_wanted()) == ((0, 1, 0), False)
    assert _section(obtained) == _section(trained)


def test_ranks_that_differ_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has changed the settings of one rank, so that it looks for another entry: all train, and none waits."""
    _source(tmp_path).obtained()
    before = _suffixes(tmp_path)

    all_reduce = dist.all_reduce

    def least(values: Tensor, **options: Any) -> None:
        all_reduce(values, **options)
        if values.numel() == 4 and values[2] > 1:
            values[2] -= 1  # the other rank's number is smaller

    monkeypatch.setattr(dist, "all_reduce", least)
    takes = _source(tmp_path)
    takes.obtained()
    elsewhere = _source(tmp_path / "empty")
    elsewhere.obtained()

    assert (_counts(takes), _counts(elsewhere)) == ((1, 0, 0), (1, 0, 0))
    assert _suffixes(tmp_path) == before
    assert not (tmp_path / "empty").exists()


def test_an_entry_whose_references_disagree_is_refused(tmp_path: Path) -> None:
    """It has the right hashes, but no case could have written it: it is removed, and judges no engine."""
    writes = _source(tmp_path)
    writes.obtained()
    assert writes.offer is not None
    assert writes.key is not None
    content = content_of(writes.offer.store.read(writes.key, 0) or b"")
    content["histories"]["all-reduce"].steps[0].params["0.weight"] += 1.0
    writes.offer.store.write(writes.key, [section(content)])

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
