"""W. Multiple forwards and re-entrancy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.cases.base import ConformanceTestCase
from fsdp_conformance.cases.declaration import conformance_case
from fsdp_conformance.fixtures import probes, reuse
from fsdp_conformance.fixtures.data import normal, place, seeded_init
from fsdp_conformance.fixtures.recipes import field_optimizers, mean_squared_error
from fsdp_conformance.plan import Sharding
from fsdp_conformance.workload.definition import Batch, BatchKey, Regime, Workload


class Reentry(ConformanceTestCase):
    """A unit's forward or backward runs more than once."""

    @conformance_case(
        "R155",
        "R002",
        "R003",
        chapter="W",
        axes={"world_size": (2, 3, 4)},
        kills=("multi-forward-loses-gradient",),
    )
    def test_called_three_times(self, world_size: int) -> None:
        """A unit called three times in one forward accumulates each gradient exactly once, bit for bit."""
        workload = probes.exact_multi_forward()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R155"})

    @conformance_case(
        "R155",
        "R002",
        "R003",
        chapter="W",
        axes={"reshard": (True, False), "world_size": (2, 4)},
        needs=("reshard_after_forward",),
        kills=("multi-forward-loses-gradient",),
    )
    def test_called_with_others_between(self, reshard: bool, world_size: int) -> None:
        """A unit called twice with another in between is at parity, whether or not it is resharded after forward."""
        workload = reuse.called_twice()
        run = self.train(workload, self.plan(workload, reshard_after_forward=reshard))
        self.check_parity(run, workload, requirements={"gradient": "R155"})

    @conformance_case("R156", "R002", "R003", chapter="W", axes={"world_size": (2, 3)}, kills=("second-backward-lost",))
    def test_two_backwards(self, world_size: int) -> None:
        """Two losses of one forward, each with its own backward, accumulate as without sharding or are rejected."""
        self._backward_twice()

    @conformance_case(
        "R156",
        "R002",
        "R003",
        chapter="W",
        axes={"sharding": ("grad_optim", "none"), "world_size": (2,)},
        needs=lambda values: [{"grad_optim": "zero2", "none": "no_shard"}[values["sharding"]]],
        kills=("second-backward-lost", "second-backward-not-reduced"),
    )
    def test_two_backwards_of_other_degrees(self, sharding: str, world_size: int) -> None:
        """The same where parameters, or everything, stay whole: each degree has its own way of reducing."""
        self._backward_twice(sharding=Sharding(sharding))

    def _backward_twice(self, **options: Any) -> None:
        workload = probes.exact_accumulation()
        regime = Regime(steps=2, backwards_per_forward=2)
        # FSDP1 says that the storage of its full parameters has been freed.
        names = ("backward", "graph", "freed", "storage")
        with self.refusal("R156", "a second backward through one forward", names=names) as outcome:
            run = self.train(workload, self.plan(workload, **options), regime)
            outcome.excused = True
        if outcome.excused:
            self.check_parity(run, workload, regime, requirements=dict.fromkeys(("gradient", "parameter"), "R156"))

    @conformance_case(
        "R156",
        "R002",
        "R003",
        chapter="W",
        world_size=2,
        needs=("custom_forward_methods",),
        kills=("sum-instead-of-mean",),
    )
    def test_other_method(self) -> None:
        """A method other than forward sees a unit's full parameters when called, or the call raises."""
        workload = _called_by_another_name()
        run = self.train(workload)
        self.check_parity(run, workload, requirements={"gradient": "R156", "parameter": "R156"})


class _Encoder(nn.Module):
    """A unit whose work is done by a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class _Caller(nn.Module):
    """A root that calls its unit's `encode`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Encoder()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder.encode(x))
        return output


def _build_caller(rank: int) -> nn.Module:
    with seeded_init("caller"):
        return _Caller()


def _caller_batch(key: BatchKey) -> Batch:
    return Batch(args=(normal((4, 6), "caller", place(key)),), target=normal((4, 3), "caller targets", place(key)))


def _called_by_another_name() -> Workload:
    return Workload(
        name="called-by-another-name",
        build=_build_caller,
        batch=_caller_batch,
        loss=mean_squared_error,
        optimizers=field_optimizers(),
        units=("encoder",),
        micro_batch_size=4,
        capabilities=frozenset({"custom_forward_methods"}),
    )
