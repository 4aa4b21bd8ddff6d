"""Tests that apply to every fault: installing, removing, counting, composing."""

from __future__ import annotations

import pytest

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.faults.fault import Fault, FaultSet


class Counted(Fault):
    """Strikes at every point; notes when it is attached and detached, in a list shared by several."""

    def __init__(self, name: str, notes: list[str], *, ranks: list[int] | None = None, breaks: bool = False) -> None:
        super().__init__(ranks)
        self.name = name
        self.notes = notes
        self.breaks = breaks

    def describe(self) -> str:
        """Its name."""
        return self.name

    def at(self, point: str, step: int) -> None:
        """Strike."""
        if self._strikes_here():
            self._fired += 1

    def _attach(self) -> None:
        if self.breaks:
            raise OSError(f"{self.name} cannot be installed")
        self.notes.append(f"+{self.name}")

    def _detach(self) -> None:
        self.notes.append(f"-{self.name}")


def test_install_and_remove_are_idempotent() -> None:
    """Twice installed is once installed; what is not installed is removed without a word."""
    notes: list[str] = []
    fault = Counted("a", notes)
    fault.remove()
    fault.install()
    fault.install()
    fault.remove(must_have_struck=False)
    fault.remove(must_have_struck=False)

    assert notes == ["+a", "-a"]
    assert not fault.installed


def test_removed_by_an_exception() -> None:
    """The context manager removes it, whatever ends the block."""
    notes: list[str] = []
    with pytest.raises(KeyError), Counted("a", notes):
        raise KeyError

    assert notes == ["+a", "-a"]


def test_strikes_only_while_installed() -> None:
    """Points before install and after remove do nothing, and each installation counts from zero."""
    fault = Counted("a", [])
    fault.at("after_loss", 0)
    with fault:
        fault.at("after_loss", 0)
        fault.at("before_step", 0)
    fault.at("after_loss", 1)

    assert fault.fired == 2
    fault.install()
    assert fault.fired == 0
    fault.remove(must_have_struck=False)


def test_silence_is_noticed() -> None:
    """A fault that never struck on a rank that it was meant for is named; on another rank its silence means nothing."""
    quiet, elsewhere, loud = Counted("quiet", []), Counted("elsewhere", [], ranks=[3]), Counted("loud", [])
    faults = FaultSet(quiet, elsewhere, loud)
    faults.install()
    loud.at("after_loss", 0)

    assert faults.silent(0) == ["quiet"]
    assert faults.silent(3) == ["quiet", "elsewhere"]
    assert faults.fired == 1
    assert quiet.silent(0) == ["quiet"]
    assert loud.silent(0) == []
    with pytest.raises(ConfigError, match="quiet never struck on rank 0, so the test proves nothing"):
        faults.remove()
    assert not any(fault.installed for fault in (faults, quiet, elsewhere, loud))


def test_a_set_is_removed_in_reverse() -> None:
    """Faults are installed in order and removed in reverse; a set within a set is one fault."""
    notes: list[str] = []
    faults = FaultSet(Counted("a", notes), FaultSet(Counted("b", notes), Counted("c", notes)))
    with faults:
        faults.at("after_loss", 0)

    assert notes == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert faults.fired == 3
    assert faults.describe() == "a; b; c"


def test_all_or_none() -> None:
    """If one fault of a set cannot be installed, none stays installed."""
    notes: list[str] = []
    faults = FaultSet(Counted("a", notes), Counted("b", notes, breaks=True), Counted("c", notes))
    with pytest.raises(OSError, match="b cannot be installed"):
        faults.install()

    assert notes == ["+a", "-a"]
    assert not faults.installed


def test_targets() -> None:
    """Without ranks a fault is meant for every rank; a set is meant for whom one of its members is meant for."""
    assert Counted("a", []).targets(17)
    assert not Counted("a", [], ranks=[1]).targets(17)
    assert FaultSet(Counted("a", [], ranks=[1]), Counted("b", [], ranks=[17])).targets(17)
    assert not FaultSet().targets(0)
