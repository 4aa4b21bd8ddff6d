"""Cases that share references: the same verdict as without, whatever lies in the store."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.harness.processes import forkserver
from fsdp_conformance.mutants import MUTANTS
from fsdp_conformance.outcome.records import REFERENCES, CaseRecord
from fsdp_conformance.references.sharing import Offer
from fsdp_conformance.references.store import ReferenceStore, content_of, section
from fsdp_conformance.run_settings import REFERENCES_STORE, RunSettings
from fsdp_conformance.selftest.cases import bound_case, run_case
from fsdp_conformance.tests.cases import cheating_engines
from fsdp_conformance.verdict import Verdict

pytestmark = pytest.mark.slow

#: One is exact, the other is judged by the noise between references.
EXACT, NOISY = "R001/exact-probe-ws2", "R001/sgd-norm-mlp-ws2"


@pytest.fixture(scope="module", autouse=True)
def _servers() -> Iterator[None]:
    """Servers of these tests alone: with modules of other tests in them, their ranks would share nothing."""
    forkserver.stop_servers()
    yield
    forkserver.stop_servers()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the references of both cases, and how they came to be there."""
    directory = tmp_path_factory.mktemp("references")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(REFERENCES_STORE, str(directory))
        for case in (EXACT, NOISY):
            record = _ran(case)
            assert (record.verdict, _counts(record)) == (Verdict.PASS, (1, 0, 0)), record.reason
    return directory


@pytest.fixture
def store(warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReferenceStore:
    """A copy of the warm store, which cases use."""
    directory = Path(shutil.copytree(warm, tmp_path / "store"))
    monkeypatch.setenv(REFERENCES_STORE, str(directory))
    return ReferenceStore(directory, 2**30)


def _ran(case: str, implementation: str = "reference", *, sampled: bool = False) -> CaseRecord:
    """The case, in a run that trains again what is in the store, or in one that does not."""
    directory = Path(os.environ[REFERENCES_STORE])
    keys = [_key_of(path) for path in directory.glob("*.references")]
    run = next(run for run in map(str, range(1000)) if all(_is_sampled(run, case, key) == sampled for key in keys))
    # A run of one case takes what other runs have left.
    return run_case(bound_case(case), implementation, base=RunSettings(report_dir=run, cases=(case,)))


def _is_sampled(run: str, case: str, key: dict[str, str]) -> bool:
    offer = Offer(directory="", limit=0, origin={}, run=run, known=frozenset())
    return offer.is_sampled(case, key)


def _counts(record: CaseRecord) -> tuple[int, int, int]:
    counts = record.measurements[REFERENCES]
    return counts["computed"], counts["shared"], counts["checked"]


def _key_of(path: Path) -> dict[str, str]:
    key: dict[str, str] = json.loads(path.read_bytes().split(b"\n", 3)[2])["key"]
    return key


def _entry(store: ReferenceStore, workload: str) -> tuple[Path, dict[str, str]]:
    """The entry of a workload, and its key."""
    ((path, key),) = [
        (path, key) for path in store.directory.glob("*.references") if (key := _key_of(path))["workload"] == workload
    ]
    return path, key


def _only(store: ReferenceStore, survivor: Path) -> None:
    """Remove all other entries."""
    for path in store.directory.iterdir():
        if path != survivor:
            path.unlink()


def _forged(store: ReferenceStore, workload: str) -> Path:
    """An entry whose hashes are right, and in whose every reference a parameter is wrong."""
    path, key = _entry(store, workload)
    contents: list[Any] = [content_of(store.read(key, rank) or b"") for rank in range(2)]
    for content in contents:
        for history in content["histories"].values():
            name = next(iter(history.steps[-1].params))
            history.steps[-1].params[name][0] += 1.0
    assert store.write(key, [section(**content) for content in contents])
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("case", [EXACT, NOISY])
def test_a_warm_store_gives_the_same_verdict(store: ReferenceStore, case: str) -> None:
    """On another engine than the one that wrote it; nothing is trained but the engine."""
    record = _ran(case, "torch-fsdp2")

    assert (record.verdict, record.reason) == (Verdict.PASS, "")
    assert _counts(record) == (0, 1, 0)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "workload"), [(EXACT, "exact-mlp"), (NOISY, "norm-mlp")])
def test_a_hit_is_what_ranks_train(store: ReferenceStore, case: str, workload: str) -> None:
    """Bit for bit, on an exact workload and on another: what a spot check compares."""
    path, _ = _entry(store, workload)
    _only(store, path)

    record = _ran(case, "torch-fsdp2", sampled=True)

    assert (record.verdict, record.reason) == (Verdict.PASS, "")
    assert _counts(record) == (1, 0, 1)


@pytest.mark.nightly
def test_a_case_that_changes_values_after_wrapping_keeps_its_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains one workload and compares with another of the same name."""
    monkeypatch.setenv(REFERENCES_STORE, str(tmp_path))
    assert _ran("R005/sharding-degree-full-ws2").verdict is Verdict.PASS
    (path,) = tmp_path.glob("*.references")
    assert _key_of(path)["workload"] == "exact-nested", "both cases must train one workload"

    record = _ran("R019/changed-in-place-ws2")

    assert record.verdict is Verdict.PASS, record.reason
    assert _counts(record) == (1, 0, 0), "what it compares with has other values, and was trained"


@pytest.mark.nightly
def test_a_known_wrong_engine_dies_with_a_warm_store(store: ReferenceStore) -> None:
    """By the finding that it dies by without one."""
    record = _ran(EXACT, MUTANTS["sum-instead-of-mean"].spec)

    assert record.verdict is Verdict.FAIL
    assert {finding.requirement for finding in record.findings} >= {"R003"}
    assert _counts(record) == (0, 1, 0)


@pytest.mark.nightly
def test_what_an_engine_leaves_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References that were trained beside a wrong engine, which has patched torch, judge the next one rightly."""
    monkeypatch.setenv(REFERENCES_STORE, str(tmp_path / "store"))
    engine = Path(cheating_engines.__file__)
    assert _ran("R004/adam-norm-mlp-ws2", f"{engine}:PatchesAdam").verdict is Verdict.FAIL

    record = _ran("R004/adam-norm-mlp-ws2")

    assert (record.verdict, _counts(record)) == (Verdict.PASS, (0, 1, 0)), record.reason


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("implementation", "verdict"),
    [("reference", Verdict.PASS), (MUTANTS["sum-instead-of-mean"].spec, Verdict.FAIL)],
)
def test_a_spot_check_finds_a_forged_entry(store: ReferenceStore, implementation: str, verdict: Verdict) -> None:
    """
    Although its hashes are right, it is removed. The case is judged by newly trained references, and a note says so.
    """
    path = _forged(store, "exact-mlp")
    _only(store, path)

    record = _ran(EXACT, implementation, sampled=True)

    assert (record.verdict, _counts(record)) == (verdict, (1, 0, 0)), record.reason
    (note,) = record.notes
    assert "a second one did" in note
    assert str(path) in note
    assert "other values" in note
    assert not path.exists()


def test_an_edited_entry_is_not_used(store: ReferenceStore) -> None:
    """The references are trained, the entry is removed, and the record says why."""
    path, _ = _entry(store, "exact-mlp")
    data = bytearray(path.read_bytes())
    # In the values, of the last rank: the others can read their parts, and must not use them.
    data[-1] ^= 1
    path.write_bytes(data)

    record = _ran(EXACT)

    assert (record.verdict, _counts(record)) == (Verdict.PASS, (1, 0, 0))
    assert any(str(path) in note and "refused and removed" in note for note in record.notes)
    assert not path.exists()


def test_an_entry_of_another_torch_is_not_used(store: ReferenceStore) -> None:
    """It is not used even under the name that this version looks for."""
    path, key = _entry(store, "exact-mlp")
    other = {**key, "torch": "2.5.0"}
    store.write(other, [store.read(key, rank) or b"" for rank in range(2)])
    moved = next(entry for entry in store.directory.glob("*.references") if _key_of(entry) == other)
    moved.replace(path)

    record = _ran(EXACT)

    assert (record.verdict, _counts(record)) == (Verdict.PASS, (1, 0, 0))
    assert any("its key is another one" in note for note in record.notes)


@pytest.mark.nightly
def test_switched_off(store: ReferenceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is trained, and nothing is written."""
    monkeypatch.setenv(REFERENCES_STORE, "off")
    before = sorted(store.directory.iterdir())

    record = _ran(EXACT)

    assert (record.verdict, _counts(record)) == (Verdict.PASS, (1, 0, 0))
    assert sorted(store.directory.iterdir()) == before
