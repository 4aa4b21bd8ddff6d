"""Delays strike where they are told to, as long as they are told to, and change no result."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.faults import pause
from fsdp_conformance.faults.delay import CollectiveDelay, FreeDelay, PointDelay
from fsdp_conformance.faults.fault import Fault, FaultSet
from fsdp_conformance.harness.context import log
from fsdp_conformance.harness.recording.process_group import BACKEND, register_recording_backend
from fsdp_conformance.harness.testcase import ShardedTrainingTestCase
from fsdp_conformance.history.collective import Op
from fsdp_conformance.tests.harness.recording import small_training
from fsdp_conformance.tests.harness.recording.small_training import STEPS

pytestmark = pytest.mark.slow

_MS = 7.0

#: Collectives of one training step, by engine: gathers, reductions.
_PER_STEP = {
    "ddp": {Op.ALL_REDUCE: 1},
    "fsdp1_full_shard": {Op.ALL_GATHER: 6, Op.REDUCE_SCATTER: 3},
    "fsdp2_reshard": {Op.ALL_GATHER: 6, Op.REDUCE_SCATTER: 3},
}


@contextmanager
def _no_time_passes() -> Iterator[list[float]]:
    """The milliseconds asked of the host's sleep, which does not happen."""
    sleeps: list[float] = []
    with mock.patch.object(time, "sleep", lambda seconds: sleeps.append(seconds * 1000)):
        yield sleeps


class Delays(ShardedTrainingTestCase):
    """Two ranks, one of them late."""

    world_size = 2
    preload = ("fsdp_conformance.tests.harness.recording.small_training", "fsdp_conformance.faults.delay")

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _trained_late(self, engine: str, fault: Fault) -> list[float]:
        """The delays that this rank was told to make; the results were those of a run without the fault."""
        register_recording_backend()
        self.start_process_group(BACKEND)
        expected = small_training.train(engine)
        with _no_time_passes() as sleeps, fault:
            got = small_training.train(engine, prepare=fault.prepare, at=fault.at)
            fired = fault.fired
        got.assert_bitwise_equal(expected)
        self.assertEqual(fired, len(sleeps))
        self.assertEqual([], log().observers)
        # Once removed it strikes no more.
        small_training.train(engine, prepare=lambda model: None, at=fault.at)
        self.assertEqual(fired, fault.fired)
        return sleeps

    @parameterized.expand([(engine, op.value, times) for engine, ops in _PER_STEP.items() for op, times in ops.items()])
    @pytest.mark.nightly
    def test_before_a_collective(self, engine: str, op: str, times: int) -> None:
        """A delay before a collective strikes at each one of training on its rank, and on no other."""
        sleeps = self._trained_late(engine, CollectiveDelay(op, ranks=[1], milliseconds=_MS))

        self.assertEqual([_MS] * (times * STEPS if self.rank == 1 else 0), sleeps)

    def test_before_any_collective(self) -> None:
        """Without an op every collective of training is delayed; those of set-up and of reading results are not."""
        sleeps = self._trained_late("fsdp2_reshard", CollectiveDelay(None, ranks=None, milliseconds=_MS))

        self.assertEqual(9 * STEPS, len(sleeps))

    def test_before_every_fourth(self) -> None:
        """`every` counts the op's collectives: of 12 gathers the first, the fifth and the ninth are delayed."""
        fault = CollectiveDelay(Op.ALL_GATHER, ranks=[0], milliseconds=_MS, every=4)
        sleeps = self._trained_late("fsdp2_reshard", fault)

        self.assertEqual(3 if self.rank == 0 else 0, len(sleeps))

    @parameterized.expand(["after_loss", "before_step"])
    @pytest.mark.nightly
    def test_at_a_point(self, point: str) -> None:
        """A delay at a point strikes once a step."""
        sleeps = self._trained_late("fsdp2_reshard", PointDelay(point, ranks=[0], milliseconds=_MS))

        self.assertEqual([_MS] * (STEPS if self.rank == 0 else 0), sleeps)

    @parameterized.expand(["ddp", "fsdp1_full_shard", "fsdp2_reshard"])
    def test_before_free(self, engine: str) -> None:
        """A delay before the free strikes once in forward and once in backward of the module's unit."""
        sleeps = self._trained_late(engine, FreeDelay("layers.1", ranks=[1], milliseconds=_MS))

        self.assertEqual([_MS] * (2 * STEPS if self.rank == 1 else 0), sleeps)

    def test_before_free_runs_while_the_unit_is_unsharded(self) -> None:
        """When it strikes, FSDP2's unit holds its full parameters, in forward and in backward."""
        register_recording_backend()
        self.start_process_group(BACKEND)
        fault = FreeDelay("layers.1", ranks=None, milliseconds=_MS)
        seen: list[torch.Size] = []
        layers: list[nn.Linear] = []

        def prepare(model: nn.Module) -> None:
            fault.prepare(model)
            layer = model.get_submodule("layers.1")
            assert isinstance(layer, nn.Linear), "the model has three linear layers"
            layers.append(layer)

        def look(_: float) -> None:
            seen.append(layers[0].weight.shape)
            self.assertNotIsInstance(layers[0].weight, DTensor)

        with mock.patch.object(time, "sleep", look), fault:
            small_training.train("fsdp2_reshard", prepare=prepare)

        self.assertEqual([torch.Size([7, 7])] * 2 * STEPS, seen)
        # Between steps the parameter is sharded: four rows on this rank, or three.
        shard = layers[0].weight
        assert isinstance(shard, DTensor), "the parameter is not sharded between steps"
        self.assertEqual(torch.Size([4 if self.rank == 0 else 3, 7]), shard.to_local().shape)

    @pytest.mark.nightly
    def test_all_of_them(self) -> None:
        """Faults compose: each strikes on its own rank, together they change nothing."""
        faults = FaultSet(
            CollectiveDelay(Op.ALL_GATHER, ranks=[0], milliseconds=1),
            CollectiveDelay(Op.REDUCE_SCATTER, ranks=[1], milliseconds=2),
            PointDelay("after_loss", ranks=[0], milliseconds=3),
            PointDelay("before_step", ranks=[1], milliseconds=4),
            FreeDelay("layers.2", ranks=[0], milliseconds=5),
        )
        sleeps = self._trained_late("fsdp1_full_shard", faults)

        expected = {0: {1: 6, 3: 1, 5: 2}, 1: {2: 3, 4: 1}}[self.rank]
        self.assertEqual(
            {milliseconds: times * STEPS for milliseconds, times in expected.items()},
            {milliseconds: sleeps.count(milliseconds) for milliseconds in set(sleeps)},
        )
        self.assertEqual([], faults.silent(self.rank))

    def test_rank_that_is_not_there(self) -> None:
        """A delay for a rank beyond the world could never strike: it is refused when it is installed."""
        register_recording_backend()
        self.start_process_group(BACKEND)
        faults = FaultSet(
            CollectiveDelay(Op.ALL_GATHER, ranks=[0, 2], milliseconds=1),
            PointDelay("after_loss", ranks=[5], milliseconds=1),
        )

        with self.assertRaisesRegex(ConfigError, r"ranks must be less than world_size=2, got \[2\].*got \[5\]"):
            faults.install()
        self.assertFalse(faults.installed or any(fault.installed for fault in faults.faults))
        self.assertEqual([], log().observers)


@pytest.mark.parametrize(
    ("make", "problems"),
    [
        (
            lambda: CollectiveDelay("gossip", ranks=[-1], milliseconds=0, every=0),
            ["op='gossip'", "every=0", "ranks=[-1]", "milliseconds=0"],
        ),
        (lambda: PointDelay("lunch", ranks=[], milliseconds=-3), ["point='lunch'", "ranks=[]", "milliseconds=-3"]),
        (lambda: FreeDelay("", ranks=None, milliseconds=float("nan")), ["fqn=''", "milliseconds=nan"]),
    ],
)
def test_every_problem_at_once(make, problems: list[str]) -> None:  # type: ignore[no-untyped-def]
    """A delay with several problems reports them all."""
    with pytest.raises(ConfigError) as caught:
        make()

    assert len(problems) == len(caught.value.problems)
    for problem in problems:
        name, value = problem.split("=")
        own_problems = [text for text in caught.value.problems if text.startswith(f"{name} must ")]
        assert [text.endswith(f", got {value}") for text in own_problems] == [True], problem


@pytest.mark.parametrize(
    ("fault", "phrase"),
    [
        (CollectiveDelay(Op.REDUCE_SCATTER, [1], 20), "delay of 20 ms before every reduce_scatter on ranks [1]"),
        (CollectiveDelay(None, None, 0.5, every=3), "delay of 0.5 ms before one in 3 collectives on every rank"),
        (PointDelay("before_step", [1, 0], 20), "delay of 20 ms before step on ranks [0, 1]"),
        (FreeDelay("net.1", None, 20), "delay of 20 ms before the parameters around 'net.1' are freed on every rank"),
    ],
)
def test_describe(fault: Fault, phrase: str) -> None:
    """A report can say what was done to a run."""
    assert phrase == fault.describe()


def test_free_delay_of_a_module_that_is_not_there() -> None:
    """The module's name is checked against the model."""
    with pytest.raises(ConfigError, match=r"fqn must name a submodule of ThreeLinear, got 'layers.9'"):
        FreeDelay("layers.9", None, 1).prepare(small_training.ThreeLinear())


def test_free_delay_follows_a_copied_model() -> None:
    """An engine that deep-copies the model is delayed all the same, and the strikes are counted in the one fault."""
    fault = FreeDelay("layers.1", None, _MS)
    model = small_training.ThreeLinear()
    fault.prepare(model)
    with _no_time_passes() as sleeps, fault:
        copy.deepcopy(model)(torch.ones(1, 5)).sum().backward()

    assert 2 == fault.fired == len(sleeps)


def test_free_delay_leaves_no_hook() -> None:
    """After remove() the model has no hooks, and before install() they do nothing."""
    fault = FreeDelay("layers.1", None, _MS)
    model = small_training.ThreeLinear()
    fault.prepare(model)
    with _no_time_passes() as sleeps:
        model(torch.ones(1, 5)).sum().backward()
        fault.install()
        fault.remove(must_have_struck=False)
        model(torch.ones(1, 5)).sum().backward()

    assert sleeps == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_free_delay_allows_in_place_operations() -> None:
    """The hooks leave the graph alone: the module's output may be changed in place."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    fault = FreeDelay("0", None, _MS)
    fault.prepare(model)
    with _no_time_passes() as sleeps, fault:
        model(torch.ones(1, 3)).sum().backward()

    assert len(sleeps) == 2


class _Clock:
    """A device whose events measure two milliseconds for any sleep, and that notes what it is told."""

    def __init__(self) -> None:
        self.slept: list[int] = []
        clock = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing, "an event that measures nothing"

            def record(self) -> None: ...

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return 2.0

        self.Event = Event
        self._sleep = clock.slept.append


def test_a_device_sleeps_in_cycles() -> None:
    """On a device that can sleep, milliseconds become cycles of its clock, measured once; the host does not wait."""
    clock = _Clock()
    pause._cycles_per_ms.cache_clear()
    with _no_time_passes() as sleeps, mock.patch.object(torch, "get_device_module", return_value=clock):
        pause.calibrate("cuda")
        calibration = list(clock.slept)
        pause.pause(30, "cuda")
        pause.pause(0.5, "cuda")
    pause._cycles_per_ms.cache_clear()

    assert calibration == [1_000_000] * 4
    # A million cycles took 2 ms, so there are 500,000 in one.
    assert clock.slept[4:] == [15_000_000, 250_000]
    assert sleeps == []


@pytest.mark.parametrize("device_type", ["cpu", ""])
def test_the_host_sleeps_for_the_cpu(device_type: str) -> None:
    """Collectives on CPU tensors, and barriers, which have no tensor, are delayed by the host's sleep."""
    with _no_time_passes() as sleeps:
        pause.calibrate(device_type)
        pause.pause(30, device_type)

    assert sleeps == [30.0]


def test_a_device_that_cannot_sleep() -> None:
    """The host sleeps instead, which makes the rank late, too."""
    with _no_time_passes() as sleeps, mock.patch.object(torch, "get_device_module", return_value=object()):
        pause.pause(30, "xpu")

    assert sleeps == [30.0]
