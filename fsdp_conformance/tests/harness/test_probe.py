"""`run_in_child`: one answer from one fresh process, or the reason why there is none."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from fsdp_conformance import errors
from fsdp_conformance.harness.probe import run_in_child

FOREVER_S = 600.0


def answer(value: Any) -> dict[str, Any]:
    """Runs in the child, as the others here."""
    return {"value": value, "pid": os.getpid(), "variable": os.environ.get("FSDP_CONFORMANCE_TEST_VARIABLE")}


def set_module_state() -> bool:
    """True if the module was already touched in this process."""
    touched, globals()["_touched"] = globals().get("_touched", False), True
    return bool(touched)


def raise_by_name(name: str) -> None:
    """Raise one of our errors, or a stranger's."""
    raise {
        "AdapterNotFound": errors.AdapterNotFound("'x' is not in adapter.py"),
        "AdapterError": errors.AdapterError(["first", "second"]),
        "EnvironmentUnavailable": errors.EnvironmentUnavailable("no gloo"),
        "ValueError": ValueError("three"),
    }[name]


def leave() -> None:
    """End without an answer."""
    print("last words", flush=True)
    os._exit(5)


def sleep() -> None:
    """Never answer."""
    time.sleep(FOREVER_S)


def not_json() -> object:
    """Answer with something that has no JSON."""
    return object()


def test_answer_comes_from_a_process_of_its_own() -> None:
    """Values come back as JSON; the environment is the caller's choice; nothing stays behind in the controller."""
    child_answer = run_in_child(answer, [1, "two", None], environment={"FSDP_CONFORMANCE_TEST_VARIABLE": "set"})

    assert (child_answer["value"], child_answer["variable"]) == ([1, "two", None], "set")
    assert os.getpid() != child_answer["pid"]
    assert [run_in_child(set_module_state), run_in_child(set_module_state)] == [False, False]


@pytest.mark.parametrize("name", ["AdapterNotFound", "AdapterError", "EnvironmentUnavailable"])
def test_our_errors_are_raised_again_as_themselves(name: str) -> None:
    """The caller gets the child's exception as if the function had run here."""
    with pytest.raises(getattr(errors, name)) as raised:
        run_in_child(raise_by_name, name)

    assert name == type(raised.value).__name__
    if isinstance(raised.value, errors.AdapterError):
        assert raised.value.problems == ("first", "second")


def test_other_errors_come_with_their_traceback() -> None:
    """The place in the child's code is in the message."""
    with pytest.raises(errors.RankRaised, match="ValueError: three") as raised:
        run_in_child(raise_by_name, "ValueError")

    assert "in raise_by_name" in str(raised.value)


def test_process_that_ends_is_told_with_its_last_words() -> None:
    """An exit code and the output."""
    with pytest.raises(errors.RankDied, match="exited with code 5") as raised:
        run_in_child(leave)

    assert "last words" in str(raised.value)


@pytest.mark.nightly
@pytest.mark.slow
def test_process_that_hangs_is_told_with_its_stack() -> None:
    """The deadline ends it, and the message says where it was."""
    with pytest.raises(errors.RankTimedOut, match="in sleep"):
        run_in_child(sleep, timeout_s=8.0)


def test_answer_that_is_not_json_is_refused() -> None:
    """The caller learns what was wrong with it."""
    with pytest.raises(errors.SuiteError, match="cannot be written as JSON"):
        run_in_child(not_json)
