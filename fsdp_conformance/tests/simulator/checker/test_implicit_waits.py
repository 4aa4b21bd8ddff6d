"""With explicit waits alone, races are found that a wait of the host for a value hides in this run."""

from __future__ import annotations

import pytest

from fsdp_conformance.simulator.checker.hazard import hazard_from_json
from fsdp_conformance.tests.simulator.simulator_machine import HOST, Machine, compiled

pytestmark = compiled


def hidden_by(m: Machine) -> list[str]:
    """For each hazard, the operation that the host waited for."""
    hazards = [hazard_from_json(record) for record in m.checker.hazards()]
    return ["" if record.hidden_by is None else record.hidden_by.op for record in hazards]


@pytest.mark.parametrize(("waits", "kind"), [("all", None), ("explicit", "read_after_write")])
def test_a_value_that_is_read_in_between(waits: str, kind: str | None) -> None:
    """`loss.item()` on the stream that writes orders what another stream reads after it."""
    m = Machine(waits=waits)
    weight, loss = m.allocate(), m.allocate()
    m.write(m.a, weight)
    m.write(m.a, loss)
    m.item(m.a, loss)

    assert m.read(m.b, weight) == kind
    assert hidden_by(m) == ["aten::item"] * (kind is not None)


@pytest.mark.parametrize(("waits", "kind"), [("all", None), ("explicit", "write_after_read")])
def test_a_value_that_is_read_does_not_stand_for_reads_before_it(waits: str, kind: str | None) -> None:
    """`loss.item()` reads what another operation of its stream has read: that one may still run."""
    m = Machine(waits=waits)
    loss = m.allocate()
    m.read(m.b, loss)
    m.item(m.b, loss)

    assert m.write(m.a, loss) == kind


@pytest.mark.parametrize("how", ["stream", "device", "event", "wait_stream"])
def test_what_the_program_waits_for_is_in_order(how: str) -> None:
    """A wait on the host or on the other stream orders them, even if a value is read before it."""
    m = Machine(waits="explicit")
    weight = m.allocate()
    m.write(m.a, weight)
    m.item(m.a, m.allocate())
    match how:
        case "stream":
            m.checker.host_wait_lane(m.a)
        case "device":
            m.checker.host_wait_device(0)
        case "event":
            m.checker.host_wait(m.checker.snapshot(m.a))
        case "wait_stream":
            m.wait_stream(m.b, m.a)

    assert m.read(m.b, weight) is None
    assert m.checker.num_hazards() == 0


def test_what_the_host_read_is_read() -> None:
    """`loss.item()` itself is done when it returns, so another stream may overwrite the loss."""
    m = Machine(waits="explicit")
    loss = m.allocate()
    m.write(m.b, loss)
    m.wait_stream(m.a, m.b)
    m.item(m.a, loss)

    assert m.write(m.b, loss) is None


def test_pinned_memory_is_in_order_once_the_copy_is_done() -> None:
    """A blocking copy has arrived when it returns: the host may read it, and another stream may send it on."""
    m = Machine(waits="explicit")
    staging = m.allocate(pinned=True)
    m.run(m.a, "write", staging, finished=True)
    m.checker.host_wait_lane(m.a, m.site("copy to the host"))

    assert m.read(HOST, staging) is None
    assert m.read(m.b, staging) is None
    # What was copied without blocking has arrived as well, in stream order; no stream has to ask for it.
    m.write(m.a, staging)
    m.item(m.a, m.allocate())
    assert m.read(HOST, staging) is None


@pytest.mark.parametrize(("waits", "kind"), [("all", None), ("explicit", "reuse_in_flight")])
def test_memory_that_is_freed_after_a_value_was_read(waits: str, kind: str | None) -> None:
    """The allocator does not know that another stream has finished."""
    m = Machine(waits=waits)
    weight = m.allocate(m.a)
    m.write(m.a, weight)
    m.wait_stream(m.b, m.a)
    m.read(m.b, weight)
    m.item(m.b, m.allocate(m.b))
    m.reuse(weight, m.a)

    assert m.write(m.a, weight) == kind
    assert hidden_by(m) == ["aten::item"] * (kind is not None)


def test_the_first_wait_after_the_access_is_named() -> None:
    """A wait before the access, or on an unrelated stream, is not named."""
    m = Machine(waits="explicit")
    weight, other = m.allocate(), m.allocate(m.c)
    m.item(m.a, weight, op="before")
    m.write(m.a, weight)
    m.item(m.c, other, op="elsewhere")
    m.item(m.a, m.allocate(), op="aten::nonzero")
    m.item(m.a, m.allocate(), op="later")
    m.read(m.b, weight)

    assert hidden_by(m) == ["aten::nonzero"]


def test_what_happened_before_the_setting_counts_as_waited_for() -> None:
    """A program may be set up in any way."""
    m = Machine()
    weight = m.allocate()
    m.write(m.a, weight)
    m.item(m.a, m.allocate())
    m.checker.waits = "explicit"

    assert m.read(m.b, weight) is None


def test_the_explanation_names_the_wait() -> None:
    """The explanation shows the line that waits."""
    m = Machine(waits="explicit")
    weight = m.allocate()
    m.write(m.a, weight)
    frames = [("/src/train.py", 12, "step")]
    m.checker.submit(m.a)
    m.checker.host_wait_lane(m.a, m.site("aten::item", stack=lambda: frames))
    m.read(m.b, weight)
    text = hazard_from_json(m.checker.hazards()[0]).explain()

    assert (
        "  in this run the host waits in between, to get a result of aten::item\n"
        "      /src/train.py:12 in step\n"
        "  without that, nothing orders the two, for example if losses are read less often\n" in text
    )
    assert hazard_from_json(hazard_from_json(m.checker.hazards()[0]).to_json()).hidden_by is not None
