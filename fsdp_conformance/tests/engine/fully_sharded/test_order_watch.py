"""Tests of the comparison of collectives before ranks issue them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from fsdp_conformance.engine.errors import ExecutionOrderError
from fsdp_conformance.engine.fully_sharded import order_watch
from fsdp_conformance.engine.fully_sharded.order_watch import OrderWatch


class Group:
    """The part of a group that a watch uses: its name, its store and its members."""

    def __init__(self, store: Store | None, name: str = "0", members: Sequence[int] = (0, 1)) -> None:
        self.store = store
        self.group_name = name
        self.members = members

    def rank(self) -> int:
        return 0


class Rank:
    """A rank: its own watch, and its own object for the store, as in a separate process."""

    def __init__(self, store: Store) -> None:
        self.store = PrefixStore("group", store)
        self.watch = OrderWatch()

    def announces(self, action: str, unit: str = "unit 0", name: str = "0", members: Sequence[int] = (0, 1)) -> None:
        self.watch.announce(Group(self.store, name, members), action, unit)  # type: ignore[arg-type]

    def next_iteration(self, *, on: bool = True) -> None:
        self.watch.begin()
        self.watch.is_on = on


@pytest.fixture(autouse=True)
def known_groups(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Groups say what torch would know of them."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.members)
    if "ranks" in request.fixturenames:
        monkeypatch.setattr(order_watch, "_store_of", lambda group: group.store)


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    """Two ranks of one group."""
    store = HashStore()
    return Rank(store), Rank(store)


def test_the_second_rank_to_come_is_told(ranks: tuple[Rank, Rank]) -> None:
    """The error has both collectives. Either rank may come first, and that one has nothing to compare with."""
    for first, second in (ranks, reversed(ranks)):
        for each in (first, second):
            each.next_iteration()
        first.announces("gather (16 elements)", "unit 0 (left)")
        with pytest.raises(ExecutionOrderError) as raised:
            second.announces("gather (10 elements)", "unit 3 (right)")
        assert str(raised.value) == (
            "this rank is about to issue the gather (10 elements) of unit 3 (right), and another rank has issued the "
            "gather (16 elements) of unit 0 (left) [rank 1]. All ranks must run the same units in the same order."
        )


def test_what_ranks_do_alike(ranks: tuple[Rank, Rank]) -> None:
    """Equal collectives may go on; tags tell of different units. Actions of which one begins like another differ."""
    one, other = ranks
    one.announces("gather (16 elements)", "unit 0")
    other.announces("gather (16 elements)", "unit 1")
    one.announces("gather (16 elements)", "unit 2")
    with pytest.raises(ExecutionOrderError):
        other.announces("gather (1", "unit 2")


def test_one_rank_runs_ahead(ranks: tuple[Rank, Rank]) -> None:
    """No rank waits: one may be iterations ahead of its peers."""
    one, other = ranks
    actions = [[f"gather ({number * step})" for number in range(1, 4)] for step in range(1, 3)]
    for each in (one, other):
        for step in actions:
            each.next_iteration()
            for action in step:
                each.announces(action)


def test_places_are_counted_whether_or_not_they_are_compared(ranks: tuple[Rank, Rank]) -> None:
    """A rank whose order changes in the middle is compared with one that has been watched from the beginning."""
    one, other = ranks
    one.next_iteration()
    other.next_iteration(on=False)
    for each in ranks:
        each.announces("gather (1)")
    other.watch.is_on = True
    for each in ranks:
        each.announces("gather (2)")
    one.announces("gather (3)")
    with pytest.raises(ExecutionOrderError):
        other.announces("gather (4)")


def test_groups_and_models_do_not_meet(ranks: tuple[Rank, Rank]) -> None:
    """Groups with different members can have the same name, as with `split_group`. A second model uses other keys."""
    one, other = ranks
    one.announces("gather (1)", members=(0, 1))
    other.announces("gather (2)", members=(2, 3))
    for each in ranks:
        each.watch = OrderWatch()
    one.announces("gather (3)")
    other.announces("gather (3)")


def test_a_store_that_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a fake group: nothing is compared, and nothing fails."""

    class Fake(Store):
        pass

    fake: Any = Fake()
    monkeypatch.setattr(order_watch, "_store_of", lambda group: group.store)
    OrderWatch().announce(Group(fake), "gather (1)", "unit 0")  # type: ignore[arg-type]
    OrderWatch().announce(Group(None), "gather (1)", "unit 0")  # type: ignore[arg-type]


def test_groups_that_torch_does_not_know() -> None:
    """A group that was made by hand has no store to compare in."""
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)

    assert order_watch._store_of(group) is None
    assert torch.distributed.is_initialized() is False
