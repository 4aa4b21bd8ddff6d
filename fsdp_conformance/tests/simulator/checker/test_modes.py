"""checker.py: modes, suspension, labels, dropped waits; on a device whose streams are synthetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fsdp_conformance.errors import EnvironmentUnavailable, HazardsFound, NothingCompared
from fsdp_conformance.simulator import checker
from fsdp_conformance.simulator.device import build
from fsdp_conformance.tests.simulator.simulator_machine import Machine, compiled

pytestmark = compiled


class Extension:
    """Replaces the extension of an active device: a machine's checker, and the functions that the device adds."""

    def __init__(self, m: Machine) -> None:
        self.machine = m
        self.Checker = self
        self.suspend, self.resume = m.checker.suspend, m.checker.resume
        self.text = ""
        self.filter: Callable[[str, int, int], bool] | None = None

    def get(self) -> Any:
        return self.machine.checker

    def set_label(self, text: str) -> str:
        before, self.text = self.text, text
        return before

    def note_touches(self) -> None:
        """Do nothing: there is no pinned memory."""

    def set_wait_filter(self, keep: Callable[[str, int, int], bool] | None) -> None:
        self.filter = keep

    def wait(self, waiting: int, waited_for: int) -> None:
        """A wait, as the device performs it."""
        if self.filter is None or self.filter("stream_waits_event", waiting, 0):
            self.machine.wait_stream(waiting, waited_for)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[Extension]:
    """An active device with a separate checker."""
    extension = Extension(Machine())
    monkeypatch.setattr(build, "loaded", lambda: extension)
    yield extension
    assert extension.filter is None


class TestChecker:
    """The functions of checker.py."""

    def race(self, active: Extension) -> None:
        m = active.machine
        block = m.allocate()
        m.write(m.a, block, op="all_gather")
        active.wait(m.b, m.a)
        m.read(m.b, block, op="mm")

    def test_without_an_active_device_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "loaded", lambda: None)

        with pytest.raises(EnvironmentUnavailable, match=r"call fsdp_conformance\.simulator\.activation\.activate\(\)"):
            checker.hazards()

    def test_clean(self, active: Extension) -> None:
        self.race(active)

        checker.expect_clean()
        assert ((), 0, 2) == (checker.hazards(), checker.num_hazards(), checker.accesses())

    def test_nothing_checked_is_not_clean(self, active: Extension) -> None:
        with pytest.raises(NothingCompared, match=r"no access was checked"):
            checker.expect_clean()

    def test_hazards_are_raised_with_their_texts(self, active: Extension) -> None:
        with checker.without_waits():
            self.race(active)

        with pytest.raises(HazardsFound, match=r"^1 hazard found") as raised:
            checker.expect_clean()
        (hazard,) = checker.hazards()
        assert (hazard.explain(),) == raised.value.texts
        assert hazard.explain() in str(raised.value)

    def test_the_control_leaves_nothing_behind_but_its_hazards(self, active: Extension) -> None:
        """Its accesses are cleared: the next program in the same memory does not race with them."""
        m = active.machine
        block = m.allocate()
        with checker.without_waits():
            m.write(m.a, block)
        m.read(m.b, block)

        assert 0 == checker.num_hazards()

    def test_clear_forgets_accesses_as_well(self, active: Extension) -> None:
        m = active.machine
        block = m.allocate()
        m.write(m.a, block)
        m.read(m.b, block)
        checker.clear()
        m.read(m.c, block)

        assert 0 == checker.num_hazards()

    def test_clear_hazards_does_not(self, active: Extension) -> None:
        m = active.machine
        block = m.allocate()
        m.write(m.a, block)
        m.read(m.b, block)
        checker.clear_hazards()
        m.read(m.c, block)

        assert 1 == checker.num_hazards()

    def test_modes_come_back(self, active: Extension) -> None:
        checker.set_mode("record")
        with checker.mode(checker.Mode.POISON), checker.reuse("worst_case"):
            inside = (active.machine.checker.mode, active.machine.checker.reuse)

        assert ("poison", "worst_case") == inside
        assert ("record", "exact") == (active.machine.checker.mode, active.machine.checker.reuse)

    def test_labels_nest(self, active: Extension) -> None:
        seen = []
        with checker.label("forward"):
            with checker.label("layers.0"):
                seen.append(active.text)
            seen.append(active.text)

        assert ["layers.0", "forward", ""] == [*seen, active.text]

    def test_suspension_ends_with_an_exception(self, active: Extension) -> None:
        seen = []

        def look() -> None:
            with checker.suspended():
                seen.append(active.machine.checker.suspended())
                raise KeyError

        with pytest.raises(KeyError):
            look()
        assert [True, False] == [*seen, active.machine.checker.suspended()]

    def test_wait_filters_nest_and_each_is_asked(self, active: Extension) -> None:
        calls: list[tuple[checker.Wait, int, int]] = []

        def count(wait: checker.Wait, stream: int, device: int) -> bool:
            calls.append((wait, stream, device))
            return True

        with checker.wait_filter(count):
            with checker.without_waits():
                self.race(active)
            self.race(active)

        assert [(checker.Wait.STREAM_WAITS_EVENT, active.machine.b, 0)] * 2 == calls
        assert 1 == checker.num_hazards()
