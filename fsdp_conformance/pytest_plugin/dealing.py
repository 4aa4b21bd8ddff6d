"""
Deals cases to the workers of pytest-xdist where ranks own their devices: the largest world first, small ones in gaps.

xdist's own schedulers send every worker a batch of tests that follow one another. With the largest worlds in front, all
workers would have cases at hand that need all devices, and wait for each other, while devices idle. Leases would still
keep cases apart, but decide nothing about the order. `packing` does.

A worker of xdist runs a test when it has been sent the one that follows, or the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_conformance.pytest_plugin.dispatch import Dispatch, Slots


class DevicesScheduling:
    """
    A scheduler of pytest-xdist, as `pytest_xdist_make_scheduler` returns it.

    `sizes` has the world size of each case by its node id, without directories. Other tests take no device.
    """

    def __init__(self, num_workers: int, slots: Slots, sizes: Mapping[str, int]) -> None:
        self._num_workers = num_workers
        self.slots = slots
        self._sizes = sizes
        self._collections: dict[Any, list[str]] = {}
        self._nodes: list[Any] = []
        self._joined: set[Any] = set()
        self._dispatch: Dispatch | None = None
        self.collection: list[str] | None = None
        """The node ids that all workers have collected; None before they have."""

    @property
    def nodes(self) -> list[Any]:
        """The workers."""
        return list(self._nodes)

    @property
    def collection_is_completed(self) -> bool:
        """True if every worker has collected."""
        return len(self._collections) >= self._num_workers

    @property
    def tests_finished(self) -> bool:
        """True if every test has ended, or has been started by the last message to its worker."""
        if not self.collection_is_completed:
            return False
        return self._dispatch is None or not (self._dispatch.left or self._dispatch.at_hand)

    @property
    def has_pending(self) -> bool:
        """True if tests are running or are left to run."""
        dispatch = self._dispatch
        return dispatch is not None and bool(dispatch.left or dispatch.at_hand or dispatch.running)

    def add_node(self, node: Any) -> None:
        """A worker has started."""
        self._nodes.append(node)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """A worker has collected. One that comes later, and has collected something else, is sent away."""
        if self.collection is not None and list(collection) != self.collection:
            node.shutdown()
            return
        self._collections[node] = list(collection)

    def schedule(self) -> None:
        """Give each worker its first test, and start what fits."""
        collections = list(self._collections.values())
        if self._dispatch is None:
            if any(other != collections[0] for other in collections):
                raise RuntimeError(
                    "the workers of pytest-xdist have collected different tests, so none can be dealt to them. "
                    "Run without -n to see what the collection depends on."
                )
            self.collection = collections[0]
            sizes = [self._sizes.get(name.rpartition("/")[2], 0) for name in self.collection]
            self._dispatch = Dispatch(sizes, self.slots)
        for node in self._nodes:
            if node in self._collections and node not in self._joined:
                self._joined.add(node)
                self._send(node, self._dispatch.join(node))
        self._start()

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """A test has ended."""
        if self._dispatch is not None:
            self._dispatch.done(node)
            self._start()

    def mark_test_pending(self, item: str) -> None:
        """A plugin wants the test to run again."""
        if self._dispatch is not None and self.collection is not None:
            self._dispatch.put_back(self.collection.index(item))
            self._start()

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        """Answers a request that is never made: nothing is taken back from a worker."""
        raise NotImplementedError

    def remove_node(self, node: Any) -> str | None:
        """A worker has ended. Returns the test that it was running, if it died."""
        self._nodes.remove(node)
        if self._dispatch is None or node not in self._joined:
            return None
        self._joined.discard(node)
        case = self._dispatch.leave(node)
        self._start()
        return self.collection[case] if case is not None and self.collection is not None else None

    def _start(self) -> None:
        """Start what fits. Nothing starts once the session ends early, because the workers are then shutting down."""
        if self._dispatch is None or any(node.shutting_down and self._dispatch.waits(node) for node in self._joined):
            return
        for start in self._dispatch.starts():
            self._send(start.worker, start.following)

    @staticmethod
    def _send(node: Any, test: int | None) -> None:
        """Send the worker its next test, or the end; in both cases it starts the one that it has at hand."""
        if test is None:
            node.shutdown()
        else:
            node.send_runtest_some([test])


def sizes_by_node_id(package: str) -> dict[str, int]:
    """The world size of each case of the suites, by the end of its node id: `test_a_parity.py::Parity::test_...`."""
    from fsdp_conformance.selftest.cases import bound_cases

    sizes = {}
    for bound in bound_cases(package):
        module = bound.owner.__module__.rpartition(".")[2]
        sizes[f"{module}.py::{bound.owner.__qualname__}::{bound.method}"] = bound.case.world_size
    return sizes
