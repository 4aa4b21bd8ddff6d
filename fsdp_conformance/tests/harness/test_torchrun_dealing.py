"""Which of torchrun's workers are the ranks of a case: hosts take turns, and no device is hidden."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from fsdp_conformance.contract.profile import load_profile
from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism
from fsdp_conformance.harness.order import CaseOrder
from fsdp_conformance.harness.torchrun import worker as torchrun
from fsdp_conformance.harness.torchrun.worker import CaseMeeting
from fsdp_conformance.run_settings import TorchrunWorker


def worker(rank: int, *, local_rank: int, host: int, world_size: int) -> TorchrunWorker:
    """A worker of this test's job: the name of the store's host does not exist."""
    return TorchrunWorker(
        rank=rank, world_size=world_size, local_rank=local_rank, host="job", port=1, holds_store=False, host_rank=host
    )


def job(*workers_per_host: int) -> list[TorchrunWorker]:
    """The workers of hosts with so many each, in torchrun's order: one host after the other."""
    places = [(local, host) for host, count in enumerate(workers_per_host) for local in range(count)]
    return [
        worker(rank, local_rank=local, host=host, world_size=len(places)) for rank, (local, host) in enumerate(places)
    ]


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """The store of the job, in this process."""
    made = HashStore()
    monkeypatch.setattr(torchrun, "_store", lambda worker: made)
    monkeypatch.setattr(torchrun, "_ARRIVAL_S", 0.05)
    torchrun._dealt.cache_clear()
    monkeypatch.setattr(torchrun, "interface_variables", lambda host: {})
    yield made
    torchrun._dealt.cache_clear()


def meetings(workers: list[TorchrunWorker], store: HashStore, world_size: int) -> list[CaseMeeting]:
    """The same case, seen from every worker, in the order of the workers."""
    for one in workers:
        store.set(f"workers/{one.rank}", f'[{one.local_rank}, {one.rank}, {one.host_rank}, "net {one.host_rank}"]')
    return [CaseMeeting(one, "case", world_size) for one in workers]


def test_hosts_take_turns(store: HashStore) -> None:
    """Two hosts of four: ranks 0 and 1 are on different hosts, and rank 0 is the first worker."""
    seen = meetings(job(4, 4), store, 2)

    assert [meeting.rank for meeting in seen] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert [meeting.worker.rank for meeting in seen if meeting.takes_part] == [0, 4]
    assert seen[0].hosts() == [
        {"LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
    ]


def test_hosts_of_different_sizes(store: HashStore) -> None:
    """Whoever has more workers has the last ranks; the workers of a host that take part are numbered from 0."""
    seen = meetings(job(1, 3), store, 3)

    assert [meeting.rank for meeting in seen] == [0, 1, 2, 3]
    assert [place["LOCAL_RANK"] for place in seen[3].hosts()] == ["0", "0", "1"]
    assert [place["LOCAL_WORLD_SIZE"] for place in seen[3].hosts()] == ["1", "2", "2"]


def test_one_host(store: HashStore) -> None:
    """All ranks are on one host, as torchrun has placed them."""
    assert [meeting.rank for meeting in meetings(job(4), store, 4)] == [0, 1, 2, 3]


def test_most_cases_cross_hosts(store: HashStore) -> None:
    """On two hosts of four, all but those of one rank; dealt host by host, only the largest would."""
    sizes = [entry.world_size for entry in load_profile("core").entries if entry.world_size <= 8]
    hosts = {
        size: {place["GROUP_RANK"] for place in meetings(job(4, 4), store, size)[0].hosts()} for size in set(sizes)
    }
    crossing = sum(len(hosts[size]) == 2 for size in sizes)

    assert crossing == sum(size > 1 for size in sizes)
    assert crossing > 0.96 * len(sizes)
    assert sum(size > 4 for size in sizes) < 0.05 * len(sizes)


def test_ranks_on_several_hosts_use_the_interface_towards_the_store(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker finds its own host's interface. Where all share one network, nothing is set."""
    hosts: list[str] = []

    def found(host: str) -> dict[str, str]:
        hosts.append(host)
        return {"GLOO_SOCKET_IFNAME": "ens5"}

    monkeypatch.setattr(torchrun, "interface_variables", found)
    seen = meetings(job(2, 2), store, 2)

    assert [place.get("GLOO_SOCKET_IFNAME") for place in seen[2].hosts()] == [None, "ens5"]
    assert hosts == ["job"]
    for number in range(4):
        store.set(f"workers/{number}", f'[{number % 2}, {number}, {number // 2}, "net"]')
    torchrun._dealt.cache_clear()
    alone = CaseMeeting(job(2, 2)[0], "case", 2)
    # A process that joins announces itself: as one of this test's, it has another network.
    monkeypatch.setattr(torchrun, "network_of_this_process", lambda: "net")
    assert "GLOO_SOCKET_IFNAME" not in alone.hosts()[0]
    assert hosts == ["job"]


def test_a_worker_that_never_came(store: HashStore) -> None:
    """The suite waits for it once; every later case fails at once with the same reason."""
    meetings(job(2, 2)[:3], store, 2)
    first = CaseMeeting(job(2, 2)[0], "case", 2)

    for _ in range(2):
        with pytest.raises(EnvironmentUnavailable, match="not all 4 workers came to torchrun's store at job:1 within"):
            _ = first.rank
    assert torchrun._dealt.cache_info().misses == 1


def orders(tmp_path: Path, device_type: str, **changes: object) -> CaseOrder:
    fields = {
        "module": "m", "qualname": "C", "test_name": "t", "file_name": "f", "directory": tmp_path, "world_size": 2,
        "device_type": device_type, "deadlines": Deadlines.nested(10.0), "determinism": Determinism(), **changes,
    }  # fmt: skip
    return CaseOrder(**fields)  # type: ignore[arg-type]


def test_ranks_know_their_place(tmp_path: Path, store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_RANK numbers a host's devices, all of which are visible: engines call `set_device(LOCAL_RANK)`."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meeting = meetings(job(4, 4), store, 2)[4]
    first, second = orders(tmp_path, "cuda", worker=meeting.worker).for_ranks({}, meeting.hosts())

    assert (second.environment["RANK"], second.environment["LOCAL_RANK"], second.environment["GROUP_RANK"]) == (
        "1", "0", "1"
    )  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES" not in first.environment | second.environment


@pytest.mark.parametrize(("count", "numbers"), [(1, "000"), (2, "010"), (0, "000")])
def test_ranks_that_share_devices_are_numbered_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, numbers: str
) -> None:
    """`set_device(LOCAL_RANK)` works on one GPU, and on the simulated one, which the controller does not have."""
    monkeypatch.setattr(devices, "device_count", lambda device_type: count)
    ranks = orders(tmp_path, "cuda", share_devices=True, world_size=3).for_ranks({})

    assert "".join(order.environment["LOCAL_RANK"] for order in ranks) == numbers
    assert [order.environment["RANK"] for order in ranks] == ["0", "1", "2"]


def test_only_ranks_on_gpus_see_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leased ones; ranks elsewhere would start the driver. A probe of an engine sees what its caller sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    leased = {"CUDA_VISIBLE_DEVICES": "5,6"}
    seen = {
        device: orders(tmp_path, device).for_ranks(leased if device == "cuda" else {})[0].environment
        for device in ("cpu", "sim", "cuda")
    }

    assert [seen[device]["CUDA_VISIBLE_DEVICES"] for device in seen] == ["", "", "5,6"]
    probe = orders(tmp_path, "cpu", hides_gpus=False).for_ranks({})[0]
    assert probe.environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_the_watchdog_of_nccl_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the ranks that wait. The user's own settings stay, and other devices have none."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    on_gpu, on_cpu = (orders(tmp_path, device).for_ranks({})[0].environment for device in ("cuda", "cpu"))

    assert (on_gpu["TORCH_NCCL_ASYNC_ERROR_HANDLING"], on_gpu["TORCH_NCCL_ENABLE_MONITORING"]) == ("0", "0")
    assert on_gpu["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in on_cpu


def test_timeouts_of_process_groups(tmp_path: Path) -> None:
    """That of a collective, except with NCCL, whose timeout strikes the ranks that wait: the rank's comes first."""
    timeouts = {
        name: orders(tmp_path, device, share_devices=shared).collective_timeout_s
        for name, device, shared in (("cpu", "cpu", False), ("shared", "cuda", True), ("nccl", "cuda", False))
    }

    assert timeouts["cpu"] == timeouts["shared"] == Deadlines.nested(10.0).collective_s
    assert timeouts["nccl"] > 8 * Deadlines.nested(10.0).case_s
    assert devices.is_scarce("cuda")


def test_nccl_is_set_for_few_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few channels and no multicast, unless the user has chosen; other devices have none of it."""
    for name in ("NCCL_NVLS_ENABLE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS"):
        monkeypatch.delenv(name, raising=False)

    def seen(device: str) -> tuple[str | None, str | None]:
        variables = orders(tmp_path, device).for_ranks({})[0].environment
        return variables.get("NCCL_NVLS_ENABLE"), variables.get("NCCL_MAX_NCHANNELS")

    assert (seen("cuda"), seen("cpu")) == (("0", "2"), (None, None))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "8")
    assert seen("cuda") == ("1", None)
