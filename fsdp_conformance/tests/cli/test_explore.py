"""`explore` prints what its child finds, and its status says whether a failure was confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_conformance.cli import arguments
from fsdp_conformance.cli.commands import explore
from fsdp_conformance.errors import ConfigError

_BEGIN = {"what": "begin", "workload": "", "name": "an-engine", "version": "1", "declared": []}
_FAILURE = {
    "what": "failure",
    "signature": "FAIL R003 (gradient parity)",
    "confirmed": True,
    "text": "the text",
    "scenario": "{}",
    "script": "the script",
    "saved": None,
}


def _done(**changes: Any) -> dict[str, Any]:
    counts = {
        "ran": 5, "passed": 5, "rejected": {}, "declined": {}, "left_out": 0, "covered": {}, "pairs": (3, 9),
        "triples": (0, 0), "shrinks": 0, "seconds": 2.0, "fails_always": False, "failures": [],
    }  # fmt: skip
    return {"what": "done", **counts, **changes}


@pytest.mark.parametrize(
    ("answers", "status", "line"),
    [
        ([_done()], 0, "explore: no failure"),
        ([_FAILURE, _done()], 1, "explore: 1 different failure"),
        ([{**_FAILURE, "confirmed": False}, _done()], 0, "1 failure on simulated ranks only"),
        ([_FAILURE, _done(fails_always=True)], 1, "stopped early"),
        ([_done(rejected={"not exact": 5})], 4, "explore: nothing was judged"),
        ([_done(ran=0)], 4, "explore: nothing was judged"),
        ([{"what": "died", "how": "was ended by SIGKILL", "output": "said before"}], 4, "said before"),
        ([], 4, ""),
    ],
    ids=["passes", "fails", "unconfirmed", "always", "rejected", "nothing", "died", "silent"],
)
def test_the_status(answers: list[dict[str, Any]], status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """0 without a confirmed failure, 1 with one, and 4 if nothing was judged."""
    returned = explore.follow([dict(answer) for answer in (_BEGIN, *answers)])

    assert returned == status
    assert line in capsys.readouterr().out


def test_a_failure_is_printed_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """The text, the scenario or the file that it was saved to, and the script if asked for."""
    explore.follow([dict(_FAILURE), dict(_FAILURE, saved="tests/test_explored_1.py"), _done()], scripts=True)
    output = capsys.readouterr().out

    assert "scenario  {}" in output
    assert "saved     tests/test_explored_1.py" in output
    assert output.count("the script") == 2


def _order(*words: str) -> dict[str, Any]:
    return explore.order_of(arguments.parse(["explore", *words]))


def test_what_was_drawn_until_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    """The counts until then are printed, and the signal goes on to the command line."""

    def answers() -> Iterator[dict[str, Any]]:
        yield dict(_BEGIN)
        yield dict(_FAILURE)
        yield {"what": "progress", "ran": 5, "counts": {k: v for k, v in _done().items() if k != "what"}}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore.follow(answers())

    printed = capsys.readouterr().out
    assert "stopped; until then:" in printed
    assert "5 examples ran" in printed or "5 scenarios ran" in printed
    assert "explore: 1 different failure" in printed


def test_the_order() -> None:
    """Seconds are the default budget; the same seed is used every time if asked for."""
    assert _order()["seconds"] == 600
    assert _order("--max-examples", "7", "--derandomize") | {"settings": None} == {
        "settings": None, "seconds": None, "max_examples": 7, "seed": 0, "save": None, "width": 120,
    }  # fmt: skip
    assert _order("--seed", "5", "--world-size", "2,3")["settings"]["world_sizes"] == (2, 3)
    assert _order("--device", "sim")["settings"]["device"] == "sim"


@pytest.mark.parametrize(
    "words",
    [("--seconds", "soon"), ("--seconds", "0"), ("--max-examples", "-1"), ("--seed", "x"), ("--device", "cuda")],
)
def test_options_out_of_range(words: tuple[str, ...]) -> None:
    """The message names the options."""
    with pytest.raises(ConfigError, match=words[0].removeprefix("--")):
        _order(*words)
