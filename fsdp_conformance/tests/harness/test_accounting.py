"""The small parts of the harness: deadlines, messages, settings, stacks."""

from __future__ import annotations

import json
import os
import struct
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.harness.deadlines import Deadlines
from fsdp_conformance.harness.environment import Determinism, rank_variables
from fsdp_conformance.harness.probe import run_in_child
from fsdp_conformance.harness.processes.mailbox import Mailbox
from fsdp_conformance.harness.processes.stacks import is_stopped, last_collectives, output_tail, readable


def test_deadlines_nest() -> None:
    """A collective ends before its rank, a rank before its case."""
    deadlines = Deadlines.nested(60.0)

    assert (deadlines.collective_s, deadlines.rank_s, deadlines.case_s) == (36.0, 51.0, 60.0)


def test_scale_multiplies_every_deadline() -> None:
    """A debugger needs all of them longer."""
    plain, scaled = (
        Deadlines.nested(10.0, rank_s=8.0, collective_s=2.0),
        Deadlines.nested(10.0, rank_s=8.0, collective_s=2.0, scale=3.0),
    )

    for name in Deadlines.__dataclass_fields__:
        assert 3.0 * getattr(plain, name) == pytest.approx(getattr(scaled, name))


def test_deadlines_that_do_not_nest_are_all_reported() -> None:
    """Every problem at once, each with what to do."""
    with pytest.raises(ConfigError) as raised:
        Deadlines(collective_s=9.0, rank_s=9.0, case_s=5.0, grace_s=0.0)

    assert len(raised.value.problems) == 3
    assert "collective_s must be less than rank_s=9.0, got 9.0" in str(raised.value)


def test_mailbox_reads_whole_messages_from_pieces() -> None:
    """A message that arrives in pieces is given out when it is complete; the reader never waits for the rest."""
    ours, theirs = Pipe()
    mailbox = Mailbox(ours)
    body = json.dumps({"report": "x" * 300}).encode()
    frame = struct.pack("!i", len(body)) + body
    received = []
    for piece in (frame[:2], frame[2:90], frame[90:] + frame[:5], frame[5:]):
        os.write(theirs.fileno(), piece)
        received.append(mailbox.receive())

    assert [[], [], [body], [body]] == received
    theirs.close()

    assert mailbox.drain() == []
    assert mailbox.closed


def test_mailbox_reads_what_a_connection_sends() -> None:
    """The framing is multiprocessing's own, in its short and in its long form."""
    ours, theirs = Pipe()
    mailbox = Mailbox(ours)
    theirs.send_bytes(b"short")
    long_header = struct.pack("!i", -1) + struct.pack("!Q", 4)
    os.write(theirs.fileno(), long_header + b"long")
    messages = mailbox.receive()
    while len(messages) < 2:
        messages += mailbox.receive()

    assert messages == [b"short", b"long"]


def test_message_to_a_rank_that_has_ended_is_no_error() -> None:
    """A goodbye may come too late."""
    ours, theirs = Pipe()
    theirs.close()
    mailbox = Mailbox(ours)
    mailbox.send({"goodbye": True})

    assert mailbox.closed


def test_determinism_settings_are_checked() -> None:
    """One error reports both problems."""
    with pytest.raises(ConfigError) as raised:
        Determinism(num_threads=0, algorithms="maybe")

    assert len(raised.value.problems) == 2


def applied(algorithms: str, num_threads: int) -> dict[str, object]:
    """The settings that `Determinism.apply` reports, and torch's own; runs in a separate process."""
    reported = Determinism(algorithms=algorithms, num_threads=num_threads, seed=7).apply()
    first = torch.rand(1).item()
    torch.manual_seed(7)
    torch.backends.cudnn.benchmark = False  # what torch.testing forbids, an implementation may do
    return {
        "said": reported,
        "seeded": first == torch.rand(1).item(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "variables": Determinism(algorithms=algorithms, num_threads=num_threads).variables(),
    }


@pytest.mark.parametrize(
    ("algorithms", "enabled", "warn_only"), [("off", False, False), ("warn", True, True), ("error", True, False)]
)
def test_determinism_is_what_torch_says_it_is(algorithms: str, enabled: bool, warn_only: bool) -> None:
    """The settings in the report are the settings in torch."""
    settings = run_in_child(applied, algorithms, 2)

    assert (True, 2, enabled, warn_only, [False, False]) == (
        settings["seeded"],
        settings["threads"],
        settings["deterministic"],
        settings["warn_only"],
        settings["tf32"],
    )
    assert {"seed": 7, "num_threads": 2, "deterministic_algorithms": algorithms}.items() <= settings["said"].items()
    assert ("CUBLAS_WORKSPACE_CONFIG" in settings["variables"]) is (
        algorithms != "off" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    )


def test_rank_variables_are_those_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines find the variables that torchrun would set, in addition to the controller's environment."""
    monkeypatch.setenv("FSDP_CONFORMANCE_TEST_VARIABLE", "kept")
    variables = rank_variables(1, 4, determinism=Determinism())

    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "FSDP_CONFORMANCE_TEST_VARIABLE": "kept",
    }
    assert expected.items() <= variables.items()
    assert "MASTER_PORT" in variables


def test_stack_is_shown_down_to_the_case() -> None:
    """The harness's own thread and the frames under the test method are left out."""
    dump = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/x/harness/rank.py", line 1 in _end_with\n'
        '  File "/x/threading.py", line 2 in run\n'
        "\n"
        "Current thread 0x2 (most recent call first):\n"
        '  File "/x/case.py", line 3 in test_parity\n'
        '  File "/x/harness/rank.py", line 4 in body\n'
        '  File "/x/forkserver.py", line 5 in main\n'
    )

    assert readable(dump) == 'Current thread 0x2 (most recent call first):\n  File "/x/case.py", line 3 in test_parity'


def test_tails_of_files_that_are_not_there() -> None:
    """A rank that died early has written nothing, and a case may have removed its directory."""
    assert (output_tail(Path("/nowhere/rank0.output")), last_collectives(Path("/nowhere/rank0.trace"))) == ("", [])
    assert not is_stopped(2**30)


def test_output_tail_is_bounded(tmp_path: Path) -> None:
    """A rank that writes megabytes does not fill the report."""
    path = tmp_path / "output"
    path.write_text("a" * 100_000 + "end")

    assert (len(output_tail(path)), output_tail(path).endswith("end")) == (8192, True)
