"""The simulated accelerator in the suite: which cases run there, what is counted, and that the search never blocks."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fsdp_conformance.adapters.vendors.torch_ddp import TorchDDP
from fsdp_conformance.adapters.vendors.torch_fsdp1 import TorchFSDP1
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.capability import CAPABILITIES
from fsdp_conformance.cases import places
from fsdp_conformance.checks.streams import stream_control, stream_safety
from fsdp_conformance.contract.gate import Place
from fsdp_conformance.driver.task import Observer
from fsdp_conformance.driver.watch import AcceleratorWatch, SimulatedWatch, Watch, watch_for
from fsdp_conformance.errors import SuiteError
from fsdp_conformance.fixtures import deep
from fsdp_conformance.harness import devices
from fsdp_conformance.history.memory import Point
from fsdp_conformance.mutants.memory import LeaksEveryStep
from fsdp_conformance.mutants.streams import FreesInFlight, StepsOnASideStream
from fsdp_conformance.plan import SIMULATED, InitMode, Plan
from fsdp_conformance.run_settings import RunSettings
from fsdp_conformance.selftest import bound_case, run_case
from fsdp_conformance.simulator.device import build
from fsdp_conformance.suites.test_h_delays import _DEGREES, _DELAYS, _PREFETCH, COVERED, stands_together
from fsdp_conformance.tests.adapters.adapter_ranks import RankTestCase
from fsdp_conformance.tests.adapters.adapter_workloads import PLAIN
from fsdp_conformance.tests.report.evidence import a_case
from fsdp_conformance.verdict import Verdict
from fsdp_conformance.workload.definition import BatchKey, Regime

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(build.unavailable() is not None, reason="no C++ compiler")

ENGINES = (TorchDDP, TorchFSDP1, TorchFSDP2)
#: On the CPU, FSDP2 of torch 2.6 does not train, and that of 2.8 sums gradients; see ci/findings.
ENGINES_RIGHT_ON_THE_CPU = ENGINES if torch.__version__ >= "2.9" else (TorchDDP, TorchFSDP1)

# Which cases.

_AXES = ("init", "offload", "degree", "prefetch", "delay")
_VALUES: dict[str, tuple[str, ...]] = {
    "init": tuple(InitMode),
    "offload": ("off", "cpu", "cpu_pinned"),
    "degree": tuple(_DEGREES),
    "prefetch": _PREFETCH,
    "delay": _DELAYS,
}


def _pairs(rows: Iterable[tuple[str, ...]]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Every two values of different axes that stand together in a row."""
    named_rows = (tuple(zip(_AXES, row, strict=True)) for row in rows)
    return {pair for row in named_rows for pair in itertools.combinations(row, 2)}


def _possible() -> list[tuple[str, ...]]:
    """Every row of the matrix that runs on an accelerator."""
    rows = itertools.product(*_VALUES.values())
    return [row for row in rows if stands_together(dict(zip(_AXES, row, strict=True))) and row[:2] != ("never", "off")]


def test_the_matrix_of_delays_covers_every_pair() -> None:
    """Any two values that can stand together stand together in a case, also where nothing rare is declared."""
    rows = _possible()

    def common(row: tuple[str, ...]) -> bool:
        return row[2] != "no-shard" and row[3] in ("default", "forward")

    assert len(rows) == 282
    assert COVERED <= set(rows)
    assert _pairs(COVERED) == _pairs(rows)
    assert _pairs(filter(common, COVERED)) == _pairs(filter(common, rows))


def _declares_all(device: str) -> frozenset[str]:
    return frozenset(CAPABILITIES)


def test_the_device_is_built_once_before_the_cases_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build is announced; a run without such a case compiles nothing."""
    messages: list[str] = []
    built: list[str] = []
    monkeypatch.setattr(build, "unavailable", lambda: None)
    monkeypatch.setattr(build, "is_built", lambda: bool(built))
    monkeypatch.setattr(places, "build_problem", lambda: built.append("now"))
    place_problem = partial(places.prepare, declared=_declares_all, say=messages.append)
    monkeypatch.setattr(places, "places", lambda settings: _places_without_compiling())

    place_problem([a_case()], RunSettings())
    place_problem([a_case(environment=("accelerator",))], RunSettings(simulator=False))
    assert (messages, built) == ([], [])
    place_problem([a_case(environment=("accelerator",))], RunSettings())
    assert messages == ["building the simulated accelerator, first use ...", "built"]
    place_problem([a_case(environment=("accelerator",))], RunSettings())
    assert built == ["now"]


def _places_without_compiling() -> dict[str, Place]:
    present, _ = devices.present_environments(SIMULATED)
    simulated = Place(device=SIMULATED, present=present)
    return {SIMULATED: simulated, "cpu": Place(device="cpu", present=frozenset({"gloo"}))}


def test_looking_for_the_device_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`list`, `doctor` and collection ask where cases would run."""
    monkeypatch.setattr(build, "require", lambda: pytest.fail("compiled"))
    monkeypatch.setattr(build, "unavailable", lambda: "no C++ compiler")
    places.build_problem.cache_clear()

    by_device = places.places(RunSettings())

    assert by_device["cpu"].problem == ""
    assert (by_device[SIMULATED].problem, by_device[SIMULATED].present) == ("no C++ compiler", frozenset())
    assert SIMULATED not in places.places(RunSettings(simulator=False))


def test_simulated_devices_are_shared_and_leased_by_nobody() -> None:
    """Each rank has its own, so as many cases fit as there are cores."""
    assert devices.is_accelerator(SIMULATED)
    assert not devices.is_scarce(SIMULATED)
    assert devices.slots(SIMULATED, 4) == devices.slots("cpu", 4)
    assert devices.backend_for(SIMULATED) == "cpu:gloo,sim:simccl"


def test_only_its_own_ranks_pay_for_it() -> None:
    """Ranks on the CPU come from another warm process."""
    assert devices.preload("cpu") == ()
    assert dict(devices.preload_environment("cpu")) == {}
    assert devices.preload(SIMULATED) == ("fsdp_conformance.simulator.activate_on_import",)
    assert dict(devices.preload_environment(SIMULATED)) != {}


# What a case on it does.


@needs_compiler
class OnTheSimulatedAccelerator(RankTestCase):
    """Two ranks, each with its own devices."""

    device_type = SIMULATED
    case_timeout_s = 120.0
    PLAN: ClassVar[dict[str, Any]] = {"device": SIMULATED, "init_mode": InitMode.BEFORE}

    @pytest.mark.nightly
    def test_engines_train_as_on_the_cpu(self) -> None:
        """Bit for bit, without a race, and something was looked at."""
        for engine in ENGINES_RIGHT_ON_THE_CPU:
            here = self.assert_trains(engine, PLAIN, **self.PLAN)
            there = self.run_training(engine, PLAIN)
            for mine, theirs in zip(here.steps, there.steps, strict=True):
                for loss, expected in zip(mine.losses, theirs.losses, strict=True):
                    self.assertTrue(torch.equal(loss, expected), msg=engine.__name__)
                for name, value in theirs.params.items():
                    self.assertTrue(torch.equal(mine.params[name], value), msg=f"{engine.__name__} {name}")
            self.assertEqual([], [hazard.sentence for hazard in here.hazards])
            self.assertGreater(here.checked_accesses or 0, 100)
            self.assertEqual((None, [], []), (there.checked_accesses, there.hazards, there.memory))

    @pytest.mark.nightly
    def test_the_loop_makes_nobody_wait(self) -> None:
        """Between setup and the end the host waits for no device, stream or event; FSDP2 asks for no such wait."""
        from fsdp_conformance.simulator import checker

        waits: list[str] = []

        def count(wait: checker.Wait, stream: int, device: int) -> bool:
            if str(wait).startswith("host_waits") and not checking.suspended():
                waits.append(str(wait))
            return True

        extension: Any = build.loaded()
        checking = extension.Checker
        with checker.wait_filter(count):
            regime = Regime(micro_batches=2, eval_before=(1,), eval_between=(1,), idle_forwards=1, keep_outputs=True)
            self.run_training(
                TorchFSDP2, PLAIN, regime, observer=Observer(on_setup=lambda adapter: waits.clear()), **self.PLAN
            )

        self.assertEqual([], waits)

    @pytest.mark.nightly
    def test_bytes_are_counted_to_the_last_one(self) -> None:
        """A leak of three floats a step is seen as twelve bytes; without it steps are alike."""
        for engine, leaked in ((TorchFSDP2, 0), (LeaksEveryStep, 12)):
            run = self.run_training(engine, PLAIN, Regime(steps=4), **self.PLAN)
            held = [mark.allocated for mark in run.memory if mark.point is Point.STEP]
            self.assertEqual([leaked] * 2, [after - before for before, after in itertools.pairwise(held[1:])])
            points = [mark.point for mark in run.memory if mark.step in (None, 0)]
            expected = [Point.BEFORE_SETUP, Point.SETUP, Point.FORWARD, Point.BACKWARD, Point.STEP]
            self.assertEqual(expected, points)

    def test_races_are_found_and_belong_to_their_requirement(self) -> None:
        """Each run finds a step without a wait, and memory that is freed in flight."""
        for engine, requirement in ((StepsOnASideStream, "R074"), (FreesInFlight, "R075")):
            run = self.run_training(engine, PLAIN, **self.PLAN)
            findings = stream_safety(run).findings
            self.assertIn(requirement, [finding.requirement for finding in findings], engine.__name__)
            self.assertIn("  first: ", findings[0].detail or "")

    @pytest.mark.nightly
    def test_a_control_that_sees_nothing_is_our_mistake(self) -> None:
        """With its waits a right engine has no race, so it is not a valid control; without them it is."""
        from fsdp_conformance.simulator import checker

        run = partial(self.run_training, TorchFSDP2, PLAIN, Regime(steps=1), **self.PLAN)
        with self.assertRaisesRegex(SuiteError, "hazards=0 with every wait dropped"):
            stream_control(run())
        with checker.without_waits():
            stream_control(run())

    def test_the_watch_of_each_device(self) -> None:
        """The CPU counts nothing; the simulated accelerator counts bytes and checks the order."""
        self.assertIs(Watch, type(watch_for(torch.device("cpu"))))
        watch = watch_for(self.device)
        self.assertIsInstance(watch, SimulatedWatch)
        self.assertIsInstance(watch, AcceleratorWatch)
        self.assertTrue(watch.counts_bytes and watch.checks_order)
        before = watch.allocated_bytes()
        allocated = torch.empty(1000, device=self.device)
        self.assertEqual(before + 4000, watch.allocated_bytes())
        del allocated
        self.assertEqual(before, watch.allocated_bytes())
        self.assertGreaterEqual(watch.peak_bytes(), before + 4000)
        watch.reset_peak()
        self.assertEqual(before, watch.peak_bytes())


class OneBackend(TorchFSDP2):
    """An engine that takes another path where the backend is not the one that it knows."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        if torch.distributed.get_backend() != "simccl":
            raise RuntimeError(f"expected simccl, got {torch.distributed.get_backend()}")
        return super().wrap(model, plan)


class OneDevice(TorchFSDP2):
    """An engine that counts the devices of its rank."""

    def wrap(self, model: nn.Module, plan: Plan) -> nn.Module:
        count = torch.get_device_module(plan.device).device_count()
        if (count, self.device.index) != (1, 0):
            raise RuntimeError(f"expected one device with number 0, got {count} devices and {self.device}")
        return super().wrap(model, plan)


@needs_compiler
class Cases(unittest.TestCase):
    """Real cases, as a run would run them."""

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_a_case_that_asks_for_an_accelerator(self) -> None:
        """It runs on the simulated one, and the record states that."""
        record = run_case(bound_case("R012/before-ws2"), "torch-fsdp2")

        self.assertEqual((Verdict.PASS, "sim"), (record.verdict, record.device), record.reason)
        self.assertIn("--device sim --case R012/before-ws2", record.repro)
        self.assertIn("stream safety", record.measurements)

    @pytest.mark.nightly
    def test_ranks_that_share_the_device(self) -> None:
        """All of them compute on the only device, and the record states that."""
        base = RunSettings(device=SIMULATED, share_devices=True)
        record = run_case(bound_case("R075/stream-safety-plain-ws4"), f"{__name__}:{OneDevice.__name__}", base=base)

        self.assertEqual((Verdict.PASS, "sharing devices"), (record.verdict, record.ranks), record.reason)
        self.assertIn("--device sim --share-devices --case", record.repro)
        self.assertEqual("0", record.environment["variables"]["LOCAL_RANK"])

    @pytest.mark.nightly
    def test_one_backend_alone(self) -> None:
        """Its name is what engines read, and the suite's own references still train on the CPU."""
        base = RunSettings(device=SIMULATED, backend="simccl")
        case = bound_case("R003/every-rank-contributes-once-ws2")
        record = run_case(case, f"{__name__}:{OneBackend.__name__}", base=base)

        self.assertEqual(Verdict.PASS, record.verdict, record.reason)
        self.assertIn("--backend simccl", record.repro)

    @pytest.mark.nightly
    @pytest.mark.slow
    def test_a_case_without_wish_stays_on_the_cpu(self) -> None:
        """It stays there unless the run is on the simulated accelerator."""
        bound = bound_case("R003/every-rank-contributes-once-ws2")
        for device in ("cpu", SIMULATED):
            record = run_case(bound, "reference", base=RunSettings(device=device))
            self.assertEqual((Verdict.PASS, device), (record.verdict, record.device), record.reason)

    def test_without_the_simulator_the_case_is_not_run(self) -> None:
        """The verdict is NOT_RUN_ENV, as on every machine without an accelerator."""
        record = run_case(bound_case("R012/before-ws2"), "torch-fsdp2", base=RunSettings(simulator=False))

        self.assertEqual((Verdict.NOT_RUN_ENV, "cpu"), (record.verdict, record.device))

    @pytest.mark.slow
    def test_a_race_fails_the_case_with_both_stacks(self) -> None:
        """The finding is an argument that a person can follow."""
        bound = bound_case("R075/stream-safety-plain-ws2")
        record = run_case(bound, f"{FreesInFlight.__module__}:{FreesInFlight.__qualname__}")

        self.assertEqual(Verdict.FAIL, record.verdict, record.reason)
        self.assertEqual("R075", record.findings[0].requirement)
        self.assertIn("streams.py", record.findings[0].detail or "")


def test_batches_are_as_large_as_the_workload_says() -> None:
    """Ragged batches change from step to step, and never exceed the size that engines are told."""
    workload = deep.deep_ragged()
    sizes = {
        workload.batch(BatchKey(step=step, rank=rank, world_size=2)).args[0].shape[0]
        for step in range(5)
        for rank in range(2)
    }

    assert sizes == {2, 3, 4, 5}
    assert workload.micro_batch_size == max(sizes)
