"""An entry comes back bit for bit, or it is refused; whatever happens to the files, no other values come back."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import models, probes
from fsdp_conformance.history.training import StepRecord, TrainingHistory
from fsdp_conformance.references.reference_set import Kind, References, from_histories
from fsdp_conformance.references.scenario import NotShared
from fsdp_conformance.references.store import ReferenceStore, Refused, content_of, entry_name, section
from fsdp_conformance.tests.references.reference_runs import references_of
from fsdp_conformance.workload.definition import Regime, Workload

KEY = {"torch": "2.13.0", "scenario": "5417", "world_size": "2"}


def _history(**fields: Any) -> TrainingHistory:
    step = StepRecord(
        step=0,
        losses=[torch.tensor(0.1, dtype=torch.float64)],
        grads={"a": torch.randn(3, 2).t(), "b": None},
        params={"a": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]), "empty": torch.empty(0, 4)},
        buffers={"count": torch.tensor(3), "mask": torch.ones(3, dtype=torch.bool), "half": torch.ones(2).bfloat16()},
        outputs=[(torch.ones(2), {"n": 3, "x": 0.1}), None, "text"],
    )
    return replace(TrainingHistory(source="float64", rank=0, world_size=2, steps=[step]), **fields)


def _store(tmp_path: Path, limit: int = 2**20) -> ReferenceStore:
    return ReferenceStore(tmp_path / "store", limit)


def _read(store: ReferenceStore, key: dict[str, str] = KEY, rank: int = 0) -> bytes:
    data = store.read(key, rank)
    assert data is not None
    return data


@pytest.mark.parametrize("workload", [probes.exact_mlp(), models.nested()], ids=lambda workload: workload.name)
def test_a_hit_equals_what_was_trained(tmp_path: Path, workload: Workload) -> None:
    """On an exact workload and on another: every bit, and every bound that is derived from the noise."""
    trained = references_of(workload, Regime(steps=2))
    store = _store(tmp_path)
    store.write(KEY, [b"", section(trained.histories, {})])

    content = content_of(_read(store, rank=1))

    assert section(**content) == section(trained.histories, {})
    read = replace(trained, histories=content["histories"])
    read.agree()
    for name in trained.expected.steps[1].params:
        assert _bound(read, name) == _bound(trained, name)


def _bound(references: References, name: str) -> str:
    return repr(references.bound(Kind.PARAMETER, 1, name))


def test_every_value_comes_back() -> None:
    """NaN, -0.0, denormals, None, empty and 0-dim tensors, and Python's own values; the wall time does not."""
    history = _history(seconds=3.5)

    loaded = content_of(section({"float64": history}, {}))["histories"]["float64"]

    assert section({"float64": loaded}, {}) == section({"float64": history}, {})
    assert loaded.seconds == 0.0
    assert loaded.steps[0].grads["b"] is None
    assert (
        loaded.steps[0].params["a"].view(torch.int32).tolist()
        == history.steps[0].params["a"].view(torch.int32).tolist()
    )
    assert loaded.steps[0].outputs[0][1] == {"n": 3, "x": 0.1}
    assert isinstance(loaded.steps[0].outputs[0], tuple)
    assert {str(value.dtype) for value in loaded.steps[0].buffers.values()} == {
        "torch.int64",
        "torch.bool",
        "torch.bfloat16",
    }


@pytest.mark.parametrize(
    "stranger", [torch.eye(2).to_sparse(), object(), torch.nn.Linear(1, 1), torch.empty(1, device="meta")]
)
def test_what_cannot_be_written_is_not_shared(stranger: object) -> None:
    """Nothing is written in part."""
    with pytest.raises(NotShared, match="which is not written down"):
        section({"float64": _history(eval_outputs=[stranger])}, {})


def test_no_entry(tmp_path: Path) -> None:
    """There may be no entry, or no directory."""
    assert _store(tmp_path).read(KEY, 0) is None
    assert _store(tmp_path).names() == frozenset()


@pytest.mark.parametrize("place", [0, 40, 140, 400, -1])
def test_an_edited_entry_is_refused(tmp_path: Path, place: int) -> None:
    """Wherever a byte differs: in the first line, the hash, the header or the values."""
    store = _store(tmp_path)
    store.write(KEY, [section({"float64": _history()}, {})])
    path = store.path(entry_name(KEY))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)

    with pytest.raises(Refused, match=r"first line|hash|header"):
        store.read(KEY, 0)


@pytest.mark.parametrize("length", [0, 10, 100, 300, -1])
def test_a_half_written_entry_is_refused(tmp_path: Path, length: int) -> None:
    """It may end anywhere."""
    store = _store(tmp_path)
    store.write(KEY, [section({"float64": _history()}, {})])
    path = store.path(entry_name(KEY))
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(Refused):
        store.read(KEY, 0)


def test_an_entry_of_another_key_is_refused(tmp_path: Path) -> None:
    """Another version of torch has another name; under the same name, the key in the entry counts."""
    store = _store(tmp_path)
    store.write(KEY, [section({"float64": _history()}, {})])
    other = {**KEY, "torch": "2.13.1"}

    assert store.read(other, 0) is None
    store.path(entry_name(KEY)).rename(store.path(entry_name(other)))
    with pytest.raises(Refused, match="its key is another one"):
        store.read(other, 0)


def test_a_rank_that_the_entry_lacks_is_refused(tmp_path: Path) -> None:
    """It has no section to read."""
    store = _store(tmp_path)
    store.write(KEY, [section({"float64": _history()}, {})])

    with pytest.raises(Refused, match="header cannot be read"):
        store.read(KEY, 1)


def test_a_structure_that_runs_nothing(tmp_path: Path) -> None:
    """An unknown kind, a record of another class, a dtype that is none, bytes too few or too many: refused."""
    for structure, rest in (
        (["code", "print()"], b""),
        (["record", "Path", ["dict"]], b""),
        (["tensor", "save", [1]], b"0000"),
        (["tensor", "float32", [2]], b"0000"),
        (["tensor", "float32", [1]], b"00000000"),
        (["tensor", "float32", [-1]], b""),
    ):
        with pytest.raises(Refused):
            content_of(json.dumps(structure).encode() + b"\n" + rest)


def test_histories_of_another_run_are_not_references() -> None:
    """An entry with a right hash and a reference too few, or those of another rank or of fewer steps."""
    workload, regime = probes.exact_mlp(), Regime(steps=1)
    names = ("float64", "all-reduce", "torch-ddp")
    whole = {name: _history(source=name) for name in names}
    options: dict[str, Any] = {"rank": 0, "world_size": 2}

    assert from_histories(workload, regime, histories=whole, absent={}, **options).samples
    for histories in (
        {"float64": whole["float64"]},
        {**whole, "all-reduce": _history(source="all-reduce", rank=1)},
        {**whole, "all-reduce": _history(source="float64")},
        {**whole, "torch-ddp": _history(source="torch-ddp", steps=[])},
    ):
        with pytest.raises(SuiteError, match="references must be all-reduce, float64, torch-ddp of 1 steps"):
            from_histories(workload, regime, histories=histories, absent={}, **options)
    del whole["all-reduce"]
    with pytest.raises(SuiteError, match="absent"):
        from_histories(workload, regime, histories=whole, absent={"all-reduce": "why not"}, **options)


def test_writers_at_once(tmp_path: Path) -> None:
    """Readers see one of the entries that were written, whole, or none."""
    store, written = _store(tmp_path), [bytes([number]) * 20_000 for number in range(4)]
    seen: list[bytes | None] = []

    def write(data: bytes) -> None:
        for _ in range(10):
            store.write(KEY, [data])
            seen.append(store.read(KEY, 0))

    writers = [threading.Thread(target=write, args=(data,)) for data in written]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)

    assert len(seen) == 40
    assert set(seen) <= set(written)
    assert [path.suffix for path in store.directory.iterdir()] == [".references"]


def test_the_least_used_entries_go_first(tmp_path: Path) -> None:
    """Above the limit; a large entry is not kept at all."""
    store = _store(tmp_path, limit=100_000)
    keys = [{**KEY, "scenario": str(number)} for number in range(6)]
    for age, key in enumerate(keys[:5]):
        assert store.write(key, [b"0" * 19_000])
        os.utime(store.path(entry_name(key)), (age, age))
    store.read(keys[0], 0)

    assert store.write(keys[5], [b"0" * 19_000])
    assert not store.write(KEY, [b"0" * 30_000])

    assert {number for number, key in enumerate(keys) if store.read(key, 0)} == {0, 3, 4, 5}
    assert store.read(KEY, 0) is None


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A store that cannot be used is as good as none."""
    (tmp_path / "store").write_text("a file")
    store = _store(tmp_path)

    assert not store.write(KEY, [b"0"])
    assert store.names() == frozenset()
