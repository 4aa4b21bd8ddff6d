"""The frames of a stack that belong to the engine."""

from __future__ import annotations

import pytest

from fsdp_conformance.report.terminal import render_record
from fsdp_conformance.stack import engine_frames, frames_of_stack, frames_of_traceback
from fsdp_conformance.tests.report.evidence import a_record
from fsdp_conformance.verdict import Verdict

TORCH = "/env/lib/python3.12/site-packages/torch"

TRACEBACK = f"""Traceback (most recent call last):
  File "/src/acme/other.py", line 1, in earlier
ValueError: handled

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/fsdp_conformance/cases/base.py", line 300, in train
    run = session.train(
  File "/env/lib/python3.12/site-packages/fsdp_conformance/driver/session.py", line 150, in train
  File "/src/acme/train.py", line 9, in outermost
  File "/src/acme/wrap.py", line 40, in forward
  File "{TORCH}/nn/modules/module.py", line 1800, in _call_impl
  File "/env/lib/python3.12/site-packages/acme/unit.py", line 212, in unshard
  File "/src/acme/pool.py", line 7, in <lambda>
  File "{TORCH}/distributed/distributed_c10d.py", line 4001, in all_gather_into_tensor
  File "/usr/lib/python3.12/contextlib.py", line 81, in inner
RuntimeError: boom
"""

#: A module is computed again in backward, after the engine has taken its parameters away.
OUTSIDE_THE_ENGINE = f"""Traceback (most recent call last):
  File "/src/fixtures/drawn.py", line 464, in _computed
  File "{TORCH}/nn/modules/linear.py", line 134, in forward
AttributeError: 'Linear' object has no attribute 'weight'
"""


def test_the_engines_own_frames_come_innermost_first() -> None:
    """Without torch's, Python's and ours, and without those of an exception that was handled."""
    assert [str(frame) for frame in engine_frames(frames_of_traceback(TRACEBACK))] == [
        "/src/acme/pool.py:7 in <lambda>",
        "acme/unit.py:212 in unshard",
        "/src/acme/wrap.py:40 in forward",
        "/src/acme/train.py:9 in outermost",
    ]


@pytest.mark.parametrize(
    ("file", "is_of_engine"),
    [
        ("/src/fsdp_conformance/engine/fully_sharded/unit.py", True),
        ("/src/fsdp_conformance/mutants/engine.py", True),
        ("/src/deepspeed/runtime/zero/stage3.py", True),
        ("/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", True),
        ("/src/torch/my_fsdp.py", True),
        ("/src/fsdp_conformance/harness/rank.py", False),
        ("/src/fsdp_conformance/cases/checks.py", False),
        ("/src/suites/test_a_parity.py", False),
        ("/src/fixtures/models.py", False),
        (f"{TORCH}/autograd/graph.py", False),
        ("/usr/lib/python3.11/threading.py", False),
        ("<string>", False),
    ],
)
def test_frames_are_told_apart_by_their_files(file: str, is_of_engine: bool) -> None:
    """The comparison works on any machine: the run file may come from another one."""
    (frame,) = frames_of_stack(f'  File "{file}", line 3 in f')

    assert frame.is_of_engine is is_of_engine


def test_torchs_own_engines_are_shown_where_there_is_no_other() -> None:
    """For torch-fsdp2 the engine is in torch."""
    text = f'File "{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param.py", line 5, in unshard\n'
    text += f'File "{TORCH}/autograd/graph.py", line 6, in backward\n'

    assert [str(frame) for frame in engine_frames(frames_of_traceback(text))] == [
        "torch/distributed/fsdp/_fully_shard/_fsdp_param.py:5 in unshard"
    ]


def test_a_report_shows_three_frames_of_an_engine_that_raised() -> None:
    """The innermost ones; nothing for a case that passed, or where the suite raised."""
    shown = render_record(a_record(verdict=Verdict.FAIL, traceback=TRACEBACK))

    assert "    raised at /src/acme/pool.py:7 in <lambda>\n    called at acme/unit.py:212 in unshard\n" in shown
    assert shown.count("called at") == 2
    assert "raised at torch/nn/modules/linear.py:134 in forward\n" in render_record(
        a_record(verdict=Verdict.FAIL, traceback=OUTSIDE_THE_ENGINE)
    )
    for verdict in (Verdict.PASS, Verdict.UNSUPPORTED, Verdict.ERROR_SUITE):
        assert "raised at" not in render_record(a_record(verdict=verdict, traceback=TRACEBACK))
