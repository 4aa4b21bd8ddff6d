"""
Studies of torch's engines on the simulated accelerator: no false race, each injected race, each removed
synchronisation.
"""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections import defaultdict
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
import torch

from fsdp_conformance.plan import SIMULATED
from fsdp_conformance.simulator.checker import Wait
from fsdp_conformance.simulator.checker.sync_sites import SyncSite, site_from_id
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.guards import checkout
from fsdp_conformance.tests.torch_versions import OLD
from studies.seeded_races import RACES, SeededRace
from studies.stream_ranks import run_on_ranks
from studies.stream_study import ALL, Job, Shown, seeded, study
from studies.stream_trainings import RACING, TRAININGS, Training

needs_compiler = pytest.mark.skipif(build.unavailable() is not None, reason="no C++ compiler")

#: A training of each kind: ci/race-freedom has them all.
SAMPLE = (
    "ddp-no-sync",
    "fsdp1-offload-bf16",
    "fsdp1-hybrid-bf16",
    "fsdp2-hybrid-deferred",
    "fsdp2-offload-clip-adamw",
    "fsdp2-checkpoint-inside",
)

#: Sites of each kind of wait and of each engine, by what is in their ids. Without any one of them the checker speaks.
GUARDS = (
    "stream_waits_event c10d::Reducer::finalize_backward",
    "collective_issue process group",
    "stream_waits_event _runtime_utils.py _pre_backward_hook",
    "stream_waits_event _runtime_utils.py _post_backward_hook",
    "host_waits_stream _runtime_utils.py _post_backward_final_callback",
    "record_stream _free_unsharded_flat_param",
    "stream_waits_event foreach_all_gather_copy_out",
    "stream_waits_event _fsdp_collectives.py foreach_reduce",
    "host_waits_event finalize_backward",
    "work_wait foreach_all_gather_copy_out",
)


def script(name: str) -> ModuleType:
    """A script under ci/, as a module."""
    loader = SourceFileLoader(f"ci_{name.replace('-', '_')}", str(checkout.ROOT / "ci" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    loader.exec_module(module)
    return module


# Sites.


@pytest.mark.parametrize(
    "site",
    [
        SyncSite(Wait.STREAM_WAITS_EVENT, "torch/distributed/fsdp/_runtime_utils.py", "_unshard", 296),
        SyncSite(Wait.RECORD_STREAM, "torch/a.py", "helper", 7, "torch/b.py:9 caller"),
        SyncSite(Wait.WORK_WAIT, "", "c10d::Reducer::finalize_backward", 0),
        SyncSite(Wait.EVENT_RECORD, "", "c10::ivalue::Future::wait", 0, "c10d::Reducer::finalize_backward"),
        SyncSite(Wait.COLLECTIVE_ISSUE, "", "process group", 0),
    ],
    ids=lambda site: site.id,
)
def test_a_site_is_a_line_of_text(site: SyncSite) -> None:
    """A site can be restored from its id."""
    assert site_from_id(site.id) == site


def test_what_is_no_id_is_refused() -> None:
    """Other texts are rejected."""
    with pytest.raises(ValueError, match="must be the id of a site"):
        site_from_id("somewhere in torch")


@pytest.mark.parametrize(
    ("file", "function", "caller", "engine"),
    [
        ("torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "f", "", "fsdp2"),
        ("torch/distributed/fsdp/_common_utils.py", "f", "torch/distributed/fsdp/_flat_param.py:1 g", "fsdp1"),
        ("torch/nn/parallel/distributed.py", "f", "", "ddp"),
        ("", "c10::ivalue::Future::wait", "c10d::Reducer::finalize_backward", "ddp"),
        ("", "torch::autograd::InputBuffer::add", "", "torch"),
        ("torch/distributed/distributed_c10d.py", "f", "torch/distributed/fsdp/_fully_shard/x.py:1 g", "fsdp2"),
        ("", "process group", "", "group"),
        ("train.py", "main", "", "program"),
    ],
)
def test_a_site_belongs_to_whom_waits(file: str, function: str, caller: str, engine: str) -> None:
    """A helper's site includes its caller."""
    site = SyncSite(Wait.STREAM_WAITS_EVENT, file, function, 1 if file else 0, caller)

    assert site.engine == engine


def test_a_training_knows_its_words() -> None:
    """Words that the engine does not have are rejected; the keys are the names."""
    with pytest.raises(ValueError, match=r"words must be known to ddp, got \['hybrid'\] \[ddp-odd\]"):
        Training(name="ddp-odd", words=frozenset({"hybrid"}))

    assert all(name == training.name for name, training in TRAININGS.items())
    assert len(TRAININGS) >= 40


# The list of sites.


@checkout.required
class TestTheList:
    """ci/sync-sites.toml."""

    def entries(self) -> list[dict[str, Any]]:
        data = tomllib.loads((checkout.ROOT / "ci/sync-sites.toml").read_text(encoding="utf-8"))
        return list(data["sites"])

    def test_every_site_is_explained(self) -> None:
        """Every site is seen, is proved redundant, or has a reason why it is not seen; its training exists."""
        explained_by = {
            **dict.fromkeys(("flagged", "numerics", "memory"), "finding"),
            "redundant": "proof",
            "unseen": "reason",
        }
        unexplained = [entry["site"] for entry in self.entries() if not entry.get(explained_by[entry["verdict"]])]

        assert unexplained == []
        assert {entry["training"] for entry in self.entries()} <= TRAININGS.keys()

    def test_what_is_proved_by_reading_has_been_read(self) -> None:
        """If no run proves that a site is redundant or shows what it is for, the reason is written out."""
        by_hand = [e for e in self.entries() if e.get("proof") == "reading" or e["verdict"] == "unseen"]

        assert all(len(entry["reason"]) > 20 for entry in by_hand)

    def test_the_page_has_its_tables(self) -> None:
        """The tables in the documentation match the list."""
        page = (checkout.ROOT / "docs/simulated-accelerator.md").read_text(encoding="utf-8")
        sync_sites = script("sync-sites")
        sites = list(sync_sites.read()[1].values())

        assert sync_sites.counts_table(sites) in page
        assert sync_sites.others_table(sites) in page

    def test_most_waits_are_guarded(self) -> None:
        """More of the waits are flagged than the 37 of 61 of the first simulator of this kind."""
        waits = [entry for entry in self.entries() if not entry["site"].startswith("event_record")]
        flagged = [entry for entry in waits if entry["verdict"] == "flagged"]

        assert len(flagged) > 37
        assert len(flagged) / len(waits) > 0.4


# On ranks. Results come from one launch per world size: launching is most of the time.


def on_ranks(jobs: list[Job]) -> dict[Job, list[Shown]]:
    """The observations of each job, by rank."""
    by_size: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        by_size[TRAININGS[job.training].world_size].append(job)
    by_job: dict[Job, list[Shown]] = {}
    for world_size, some in by_size.items():
        answers = run_on_ranks(study, some, world_size=world_size, device_type=SIMULATED, timeout_s=600)
        for job, *of_ranks in zip(some, *answers, strict=True):
            by_job[job] = [Shown(**shown) for shown in of_ranks]
    return by_job


@pytest.mark.slow
@pytest.mark.nightly
@needs_compiler
@checkout.required
def test_nothing_races_and_every_number_is_the_cpus() -> None:
    """All accesses are ordered, losses and parameters are bitwise the CPU's, and without waits there are findings."""
    result = script("race-freedom").check([TRAININGS[name] for name in SAMPLE])

    assert {name: problem for name, (problem, _) in result.items()} == dict.fromkeys(SAMPLE, "")


@pytest.mark.skipif(OLD, reason="the races are put into the FSDP2 of newer versions")
@pytest.mark.slow
@pytest.mark.nightly
@needs_compiler
def test_seeded_races_are_found() -> None:
    """Each race of a real engine is found when its defect is put in, and nothing is found without it."""
    wrong: dict[str, Any] = {}
    for world_size in (2, 4):
        races = [race for race in RACES if race.world_size == world_size]
        names = [race.name for race in races]
        answers = run_on_ranks(seeded, names, "worst_case", world_size=world_size, device_type=SIMULATED, timeout_s=600)
        for race, *of_ranks in zip(races, *answers, strict=True):
            wrong |= _misjudged(race, of_ranks)

    assert wrong == {}


def _misjudged(race: SeededRace, of_ranks: list[tuple[list[str], list[str]]]) -> dict[str, Any]:
    without = [line for clean, _ in of_ranks for line in clean]
    kinds = {line.partition(":")[0] for _, lines in of_ranks for line in lines}
    return {} if not without and kinds == race.kinds else {race.name: (without, sorted(kinds), sorted(race.kinds))}


def test_a_race_that_is_not_found_has_a_reason() -> None:
    """For races that the checker misses, the reason is given."""
    assert [race.name for race in RACES if bool(race.kinds) == bool(race.reason)] == []
    assert len({race.name for race in RACES}) == len(RACES) >= 20


@pytest.mark.slow
@pytest.mark.nightly
@needs_compiler
@checkout.required
def test_a_wait_that_is_taken_out_is_missed() -> None:
    """Sites of each kind and engine, dropped one by one, give the findings of the list."""
    version, sites = script("sync-sites").read()
    if version != torch.__version__.partition("+")[0]:
        pytest.skip(f"the list is for torch {version}")
    chosen = [_guard(sites, words) for words in GUARDS]
    outcomes = on_ranks([Job(entry.training, (entry.site,), "worst_case") for entry in chosen])

    for entry, of_ranks in zip(chosen, outcomes.values(), strict=True):
        assert entry.finding in [line for shown in of_ranks for line in shown.hazards], entry.site


def _guard(sites: dict[str, Any], words: str) -> Any:
    """The first flagged site with all of these words in its id."""
    return next(e for e in sites.values() if e.verdict == "flagged" and all(word in e.site for word in words.split()))


@pytest.mark.slow
@pytest.mark.nightly
@needs_compiler
@checkout.required
def test_the_list_knows_every_site() -> None:
    """The installed torch has no synchronisation, in a training of each engine, that the list does not have."""
    sync_sites = script("sync-sites")
    version, sites = sync_sites.read()
    if version != torch.__version__.partition("+")[0]:
        pytest.skip(f"the list is for torch {version}")
    jobs = [Job(name) for name in ("ddp-many-buckets-adamw", "fsdp1-offload-bf16", "fsdp2-hybrid", "fsdp2-clip")]
    whole = {job.training: {"sites": of_ranks[0].sites} for job, of_ranks in on_ranks(jobs).items()}

    assert list(sync_sites.new_sites(whole, sites)) == []
    assert all(shown["sites"] for shown in whole.values())


@pytest.mark.slow
@pytest.mark.nightly
@needs_compiler
def test_order_is_the_same_in_equal_runs() -> None:
    """Runs of one training have one digest and one list of findings; without waits the digest is another."""
    plain, control = Job("fsdp2-both-prefetch"), Job("fsdp2-both-prefetch", (ALL,))
    twice = run_on_ranks(study, [plain, control, plain, control], world_size=2, device_type=SIMULATED)

    for shown in twice:
        assert shown[0]["digest"] == shown[2]["digest"] != shown[1]["digest"]
        assert shown[0]["hazards"] == shown[2]["hazards"] == []
        assert shown[1]["hazards"] == shown[3]["hazards"] != []
        assert shown[0]["outcome"]["losses"] == shown[2]["outcome"]["losses"]


#: Of the findings in trainings in which torch itself races the plainest: kind, then who touches the memory.
KNOWN_RACES = {
    "ddp-mixed-precision": [
        # The stream that casts parameters does not wait for the optimizer,
        ("read_after_write", "_root_copy_hook:1321", "_multi_tensor_sgd:472"),
        # and the one that casts gradients does not keep what it reads from being given to the backward pass.
        ("reuse_in_flight", "aten::mm@default write", "_reducer_allreduce_and_upcast_hook:60"),
    ],
    # The scale is copied to the CPU without blocking, and read there at once.
    "fsdp1-offload-grad-scaler": [("host_read_in_flight", "_unscale_grads_:221", "get:33")],
}


@pytest.mark.slow
@pytest.mark.nightly
@needs_compiler
def test_races_of_torch_itself_are_found() -> None:
    """DDP's mixed precision and the scaler of offloaded gradients race in torch 2.13, and the checker reports it."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the findings are those of torch 2.13")
    jobs = [Job(name) for name in RACING]
    answers = run_on_ranks(study, jobs, world_size=2, device_type=SIMULATED)
    missed = [
        words
        for of_rank in answers
        for job, shown in zip(jobs, of_rank, strict=True)
        for words in KNOWN_RACES[job.training]
        if not any(all(word in line for word in words) for line in shown["hazards"])
    ]

    assert missed == []
