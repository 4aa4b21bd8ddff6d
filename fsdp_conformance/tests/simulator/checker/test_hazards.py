"""Tests for the text of hazards: each kind word for word, stacks, and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch
from expecttest import TestCase

from fsdp_conformance.driver.watch import hazard_record
from fsdp_conformance.harness import rank
from fsdp_conformance.simulator.checker.hazard import (
    Access,
    Hazard,
    HazardKind,
    Site,
    Stream,
    Useless,
    UselessWait,
    hazard_from_json,
)
from fsdp_conformance.simulator.frames import Frame
from fsdp_conformance.tests.simulator.simulator_machine import DEADLINE_S, HOST, Machine, compiled

TORCH = os.path.dirname(torch.__file__)

HOST_STREAM = Stream(device=-1, number=0, name="host")
DEFAULT = Stream(device=0, number=0, name="default stream")
GATHER = Stream(device=0, number=2, name="all-gather")
UNNAMED = Stream(device=0, number=3, name="stream")

FREE = Site(op="free", stack=(Frame(file="/src/acme/unit.py", line=80, function="reshard"),))


def site(op: str, line: int, **fields: Any) -> Site:
    """An operation of a user's engine."""
    return Site(op=op, stack=(Frame(file="/src/acme/unit.py", line=line, function="unshard"),), **fields)


def access(kind: str, stream: Stream, of: Site, **fields: Any) -> Access:
    """All bytes of a block of 256."""
    return Access(
        kind=kind, stream=stream, site=of, **{"offset": 0, "run": 256, "repeats": (), "allocation": 1, **fields}
    )


def hazard(kind: HazardKind, then: Access, now: Access, **fields: Any) -> Hazard:
    """A hazard in block 7 of device 0."""
    usual: dict[str, Any] = {
        "device": 0, "pinned": False, "block": 7, "nbytes": 256, "allocated": None, "freed": None,
        "tenant_stream": DEFAULT, "then_block": 7, "then_nbytes": 256, "count": 1,
    }  # fmt: skip
    return Hazard(kind=kind, then=then, now=now, **{**usual, **fields})


GATHERING = access("write", GATHER, site("all_gather_into_tensor", 12, label="layers.0", tensor="layers.0.weight"))
MULTIPLYING = access("read", DEFAULT, site("aten::mm", 30, label="forward"))


class TestTexts(TestCase):
    """Each kind, as a person reads it."""

    maxDiff = None

    def test_read_after_write(self) -> None:
        described = hazard(
            HazardKind.READ_AFTER_WRITE, GATHERING, MULTIPLYING, allocated=site("aten::empty.memory_format", 9), count=3
        )

        self.assertExpectedInline(
            described.explain(),
            """\
read after write on sim:0: aten::mm on the default stream reads what all_gather_into_tensor on the all-gather
  stream writes, without waiting for it (seen 3 times)
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
    of layers.0.weight, in layers.0
      /src/acme/unit.py:12 in unshard
  then: aten::mm on the default stream reads bytes 0 to 255 (256 bytes)
    in forward
      /src/acme/unit.py:30 in unshard
  memory: block 7 of sim:0 (256 bytes)
  allocated by aten::empty.memory_format
      /src/acme/unit.py:9 in unshard
  missing:
    # before aten::mm (/src/acme/unit.py:30 in unshard), with the default stream current
    work.wait()
    # or, if all_gather_into_tensor returned no Work
    default_stream.wait_stream(all_gather_stream)""",
        )

    def test_write_after_read(self) -> None:
        """A column of a matrix; a stream without a name."""
        column = {"offset": 4, "run": 4, "repeats": ((8, 32),)}
        described = hazard(
            HazardKind.WRITE_AFTER_READ,
            access("read", UNNAMED, site("aten::copy_", 40), **column),
            access("write", DEFAULT, site("aten::zero_", 41), **column),
        )

        self.assertExpectedInline(
            described.explain(),
            """\
write after read on sim:0: aten::zero_ on the default stream overwrites what aten::copy_ on stream 3 reads,
  without waiting for it
  first: aten::copy_ on stream 3 reads 32 of bytes 4 to 231 (8 runs of 4 bytes)
      /src/acme/unit.py:40 in unshard
  then: aten::zero_ on the default stream writes 32 of bytes 4 to 231 (8 runs of 4 bytes)
      /src/acme/unit.py:41 in unshard
  memory: block 7 of sim:0 (256 bytes)
  missing:
    # before aten::zero_ (/src/acme/unit.py:41 in unshard)
    default_stream.wait_stream(stream_3)""",
        )

    def test_write_after_write(self) -> None:
        """The first stream belongs to another device."""
        reducing = access("write", replace(UNNAMED, device=1), site("reduce_scatter_tensor", 50))
        described = hazard(HazardKind.WRITE_AFTER_WRITE, reducing, replace(GATHERING, site=site("all_reduce", 51)))

        self.assertExpectedInline(
            described.explain(),
            """\
write after write on sim:0: all_reduce on the all-gather stream overwrites what reduce_scatter_tensor on
  stream 3 of sim:1 writes, without waiting for it
  first: reduce_scatter_tensor on stream 3 of sim:1 writes bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:50 in unshard
  then: all_reduce on the all-gather stream writes bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:51 in unshard
  memory: block 7 of sim:0 (256 bytes)
  missing:
    # before all_reduce (/src/acme/unit.py:51 in unshard), with the all-gather stream current
    work.wait()
    # or, if reduce_scatter_tensor returned no Work
    all_gather_stream.wait_stream(stream_3)""",
        )

    def test_reuse_in_flight(self) -> None:
        described = hazard(
            HazardKind.REUSE_IN_FLIGHT,
            GATHERING,
            access("write", DEFAULT, site("aten::fill_.Scalar", 60), allocation=2),
            freed=FREE,
            allocated=site("aten::empty.memory_format", 59),
        )

        self.assertExpectedInline(
            described.explain(),
            """\
reuse of memory in flight on sim:0: aten::fill_.Scalar on the default stream uses memory that was freed while
  all_gather_into_tensor on the all-gather stream was still writing it
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
    of layers.0.weight, in layers.0
      /src/acme/unit.py:12 in unshard
  then: aten::fill_.Scalar on the default stream writes bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:60 in unshard
  memory: block 7 of sim:0 (256 bytes)
  allocated by aten::empty.memory_format
      /src/acme/unit.py:59 in unshard
  its previous tenant, allocated on the default stream, was freed
      /src/acme/unit.py:80 in reshard
  missing:
    # before the tensor is freed (/src/acme/unit.py:80 in reshard)
    tensor.record_stream(all_gather_stream)
    # or, after all_gather_into_tensor (/src/acme/unit.py:12 in unshard) and still before the tensor is freed
    default_stream.wait_stream(all_gather_stream)""",
        )

    def test_reuse_in_flight_in_the_worst_case(self) -> None:
        described = hazard(
            HazardKind.REUSE_IN_FLIGHT,
            GATHERING,
            access("write", DEFAULT, site("aten::fill_.Scalar", 60)),
            freed=FREE,
            then_block=5,
            then_nbytes=1024,
        )

        self.assertExpectedInline(
            described.explain(),
            """\
reuse of memory in flight on sim:0: aten::fill_.Scalar on the default stream may be given memory that was
  freed while all_gather_into_tensor on the all-gather stream was still writing it
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
    of layers.0.weight, in layers.0
      /src/acme/unit.py:12 in unshard
  then: aten::fill_.Scalar on the default stream writes bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:60 in unshard
  memory: block 7 of sim:0 (256 bytes)
  in another run, a caching allocator may choose block 5 (1024 bytes) instead
  its previous tenant, allocated on the default stream, was freed
      /src/acme/unit.py:80 in reshard
  missing:
    # before the tensor is freed (/src/acme/unit.py:80 in reshard)
    tensor.record_stream(all_gather_stream)
    # or, after all_gather_into_tensor (/src/acme/unit.py:12 in unshard) and still before the tensor is freed
    default_stream.wait_stream(all_gather_stream)""",
        )

    def test_a_free_without_a_stack_of_its_own(self) -> None:
        """A free without a recorded stack is shown by the operation after it."""
        described = hazard(
            HazardKind.REUSE_IN_FLIGHT,
            GATHERING,
            access("write", DEFAULT, site("aten::zero_", 60), allocation=2),
            freed=replace(FREE, op="free, before"),
        )

        self.assertIn("was freed before this operation\n      /src/acme/unit.py:80 in reshard\n", described.explain())

    def test_reuse_on_a_stream_that_does_not_wait_for_the_allocating_one(self) -> None:
        described = hazard(
            HazardKind.REUSE_IN_FLIGHT,
            access("read", DEFAULT, site("aten::mm", 30)),
            access("write", GATHER, site("all_gather_into_tensor", 12), allocation=2),
            freed=FREE,
        )

        self.assertExpectedInline(
            described.explain(),
            """\
reuse of memory in flight on sim:0: all_gather_into_tensor on the all-gather stream uses memory that was freed
  while aten::mm on the default stream was still reading it
  first: aten::mm on the default stream reads bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:30 in unshard
  then: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:12 in unshard
  memory: block 7 of sim:0 (256 bytes)
  its previous tenant, allocated on the default stream, was freed
      /src/acme/unit.py:80 in reshard
  missing:
    # after the memory is allocated, before all_gather_into_tensor (/src/acme/unit.py:12 in unshard)
    all_gather_stream.wait_stream(default_stream)""",
        )

    def test_reuse_of_pinned_memory_in_flight(self) -> None:
        """The caching allocator of the host gives memory out to everybody: there is no stream to wait on."""
        described = hazard(
            HazardKind.REUSE_IN_FLIGHT,
            access("read", UNNAMED, site("aten::copy_", 70)),
            access("write", HOST_STREAM, site("aten::fill_.Scalar", 71), allocation=2),
            pinned=True,
            tenant_stream=HOST_STREAM,
        )

        self.assertExpectedInline(
            "\n".join(described.missing()),
            """\
# after aten::copy_ (/src/acme/unit.py:70 in unshard), before the tensor is freed
event = stream_3.record_event()
event.synchronize()""",
        )

    def test_host_write_in_flight(self) -> None:
        described = hazard(
            HazardKind.HOST_WRITE_IN_FLIGHT,
            access("read", UNNAMED, site("aten::copy_", 70)),
            access("write", HOST_STREAM, site("aten::fill_.Scalar", 71)),
            pinned=True,
        )

        self.assertExpectedInline(
            described.explain(),
            """\
host write in flight on pinned memory: aten::fill_.Scalar on the host overwrites what aten::copy_ on stream 3
  reads, without having waited for it
  first: aten::copy_ on stream 3 reads bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:70 in unshard
  then: aten::fill_.Scalar on the host writes bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:71 in unshard
  memory: block 7 of pinned memory (256 bytes)
  missing:
    # after aten::copy_ (/src/acme/unit.py:70 in unshard)
    event = stream_3.record_event()
    # before the host writes: aten::fill_.Scalar (/src/acme/unit.py:71 in unshard)
    event.synchronize()""",
        )

    def test_host_read_in_flight(self) -> None:
        described = hazard(
            HazardKind.HOST_READ_IN_FLIGHT,
            access("write", DEFAULT, site("aten::copy_", 70, tensor="gradient")),
            access("read", HOST_STREAM, site("aten::sum", 71)),
            pinned=True,
        )

        self.assertExpectedInline(
            described.explain(),
            """\
host read in flight on pinned memory: aten::sum on the host reads what aten::copy_ on the default stream
  writes, without having waited for it
  first: aten::copy_ on the default stream writes bytes 0 to 255 (256 bytes)
    of gradient
      /src/acme/unit.py:70 in unshard
  then: aten::sum on the host reads bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:71 in unshard
  memory: block 7 of pinned memory (256 bytes)
  until the host has waited, it reads NaN here; on a GPU it reads whatever the memory holds by then
  missing:
    # after aten::copy_ (/src/acme/unit.py:70 in unshard)
    event = default_stream.record_event()
    # before the host reads: aten::sum (/src/acme/unit.py:71 in unshard)
    event.synchronize()""",
        )

    def test_uninitialized(self) -> None:
        """The allocation, and the use; the memory itself, or what was computed from it."""
        described = hazard(
            HazardKind.UNINITIALIZED_READ,
            access("write", DEFAULT, site("aten::empty", 9)),
            access("read", DEFAULT, site("all_reduce", 30)),
        )

        self.assertExpectedInline(
            described.explain(),
            """\
use of uninitialized memory on sim:0: all_reduce on the default stream uses a value that nothing has written
  allocated by aten::empty, 256 bytes
      /src/acme/unit.py:9 in unshard
  used: all_reduce on the default stream reads bytes 0 to 255 (256 bytes)
      /src/acme/unit.py:30 in unshard
  missing:
    # after aten::empty (/src/acme/unit.py:9 in unshard), before all_reduce (/src/acme/unit.py:30 in unshard)
    tensor.zero_()  # if zeros are right there; else write every element, or leave out what is padding""",
        )
        derived = replace(described, block=8)
        assert derived.sentence().endswith("uses a value computed or copied from memory that nothing has written")

    def test_a_wait_that_does_not_help(self) -> None:
        """The line that waits, what it waits for, and what to do."""
        recorded, waited = site("event", 11), site("wait", 12)
        early = UselessWait(
            why=Useless.RECORDED_TOO_EARLY,
            stream=GATHER,
            device=-1,
            recorded=recorded,
            waiter=DEFAULT,
            waited=waited,
        )
        of_host = replace(early, waiter=HOST_STREAM, stream=UNNAMED, recorded=None)
        line_of_event, gathering = "/src/acme/unit.py:11 in unshard", "all_gather_into_tensor on the all-gather stream"
        elsewhere = f"{gathering} is not on that stream. Wait for the all-gather stream"
        for wait, waiter, what, advice in (
            (
                early,
                "the default stream",
                f"an event that was recorded on the all-gather stream at {line_of_event}",
                f"it was recorded before {gathering}. Record it after that",
            ),
            (
                replace(early, recorded=site("all_reduce", 11)),
                "the default stream",
                f"all_reduce on the all-gather stream at {line_of_event}",
                f"{gathering} comes after it. Wait for that, too",
            ),
            (
                replace(early, why=Useless.OTHER_STREAM, stream=UNNAMED),
                "the default stream",
                f"an event that was recorded on stream 3 at {line_of_event}",
                elsewhere,
            ),
            (
                replace(early, why=Useless.OTHER_STREAM, stream=UNNAMED, recorded=site("event", 12)),
                "the default stream",
                "stream 3",
                elsewhere,
            ),
            (replace(of_host, why=Useless.OTHER_STREAM), "the host", "stream 3", elsewhere),
            (
                replace(of_host, why=Useless.OTHER_DEVICE, device=1),
                "the host",
                "sim:1",
                f"{gathering} runs on sim:0. Wait for that device",
            ),
            (
                replace(of_host, why=Useless.WAITS_TOO_EARLY, stream=GATHER),
                "the host",
                "the all-gather stream",
                f"{gathering} comes later. Wait after that",
            ),
        ):
            text = hazard(HazardKind.READ_AFTER_WRITE, GATHERING, MULTIPLYING, useless_waits=(wait,)).explain()
            where = "/src/acme/unit.py:12 in unshard"
            expected = f"  at {where} {waiter} waits for {what}, which does not order the two:\n    {advice}\n"
            assert expected in text, text

    def test_waits_of_torch_s_own_are_not_named(self) -> None:
        """Unless they wait in between for an event, as an engine's do that was changed."""
        inside = Frame(file=f"{os.path.dirname(torch.__file__)}/nn/parallel/distributed.py", line=3, function="forward")
        user = site("wait", 12)
        own = replace(user, stack=(inside, *user.stack))
        wait = UselessWait(
            why=Useless.OTHER_DEVICE, stream=HOST_STREAM, device=1, recorded=None, waiter=HOST_STREAM, waited=own
        )  # fmt: skip
        of_user = replace(wait, why=Useless.WAITS_TOO_EARLY, waited=user)
        described = hazard(HazardKind.READ_AFTER_WRITE, GATHERING, MULTIPLYING, useless_waits=(wait, of_user))

        assert described.useless_wait == of_user
        assert replace(described, useless_waits=(wait,)).useless_wait is None
        assert hazard_from_json(json.loads(json.dumps(described.to_json()))) == described

    def test_a_record_for_the_history_says_the_same(self) -> None:
        described = hazard(HazardKind.READ_AFTER_WRITE, GATHERING, MULTIPLYING, count=2)
        record = hazard_record(described)

        self.assertEqual(
            ("all_gather_into_tensor", "layers.0", "aten::mm", "forward", 2),
            (record.then_op, record.then_label, record.now_op, record.now_label, record.count),
        )
        self.assertEqual(described.explain(), record.text)
        self.assertEqual(described.sentence(), record.sentence)


class TestStacks(TestCase):
    """The user's frames, and one line for what lies between them."""

    maxDiff = None

    step = Frame(file="/src/train.py", line=5, function="step")
    hook = Frame(file="/src/acme/wrap.py", line=6, function="pre_forward")
    stack = (
        Frame(file=f"{TORCH}/_ops.py", line=1, function="__call__"),
        Frame(file=f"{TORCH}/distributed/distributed_c10d.py", line=2, function="all_gather_into_tensor"),
        Frame(
            file=f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line=3, function="foreach_all_gather"
        ),
        hook,
        Frame(file=f"{TORCH}/nn/modules/module.py", line=4, function="_call_impl"),
        step,
        Frame(file="/env/site-packages/lightning.py", line=7, function="fit"),
        Frame(file=rank.__file__, line=8, function="body"),
        Frame(file="<frozen runpy>", line=9, function="run_path"),
    )

    def shown(self, stack: tuple[Frame, ...], **options: bool) -> str:
        then = replace(GATHERING, site=Site(op="all_gather_into_tensor", stack=stack))
        text = hazard(HazardKind.READ_AFTER_WRITE, then, MULTIPLYING).explain(**options)
        begin, end = text.index("  first:"), text.index("  then:")
        return text[begin:end]

    def test_frames_of_torch_are_folded(self) -> None:
        self.assertExpectedInline(
            self.shown(self.stack),
            """\
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
      ... 3 frames, among them torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:3 in foreach_all_gather
      /src/acme/wrap.py:6 in pre_forward
      ... torch/nn/modules/module.py:4 in _call_impl
      /src/train.py:5 in step
""",
        )

    def test_frames_of_libraries_are_folded(self) -> None:
        """As those of torch are, between the user's lines; a stack of nothing else shows them."""
        library = tuple(
            Frame(file=f"/env/site-packages/lightning/{name}.py", line=line, function=name)
            for line, name in enumerate(("strategy", "loop"))
        )
        self.assertExpectedInline(
            self.shown((self.stack[0], *library, self.step, *library, self.step)),
            """\
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
      ... 3 frames, among them lightning/strategy.py:0 in strategy
      /src/train.py:5 in step
      ... 2 frames, among them lightning/strategy.py:0 in strategy
      /src/train.py:5 in step
""",
        )
        self.assertExpectedInline(
            self.shown((self.stack[0], *library)),
            """\
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
      ... torch/_ops.py:1 in __call__
      lightning/strategy.py:0 in strategy
      lightning/loop.py:1 in loop
""",
        )

    def test_where_the_wait_belongs_if_one_line_has_issued_both(self) -> None:
        """The user's line would say nothing."""
        copying = Frame(file=f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line=9, function="copy_in")
        described = hazard(
            HazardKind.READ_AFTER_WRITE,
            access("write", UNNAMED, Site(op="aten::copy_", stack=(self.stack[0], copying, self.step))),
            access("read", GATHER, Site(op="all_gather_into_tensor", stack=(*self.stack[:3], self.step))),
        )

        self.assertExpectedInline(
            "\n".join(described.missing()),
            """\
# before all_gather_into_tensor (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:3 in foreach_all_gather)
all_gather_stream.wait_stream(stream_3)""",
        )

    def test_full_stacks(self) -> None:
        self.assertExpectedInline(
            self.shown(self.stack, full_stacks=True),
            """\
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
      torch/_ops.py:1 in __call__
      torch/distributed/distributed_c10d.py:2 in all_gather_into_tensor
      torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:3 in foreach_all_gather
      /src/acme/wrap.py:6 in pre_forward
      torch/nn/modules/module.py:4 in _call_impl
      /src/train.py:5 in step
      lightning.py:7 in fit
      fsdp_conformance/harness/rank.py:8 in body
      <frozen runpy>:9 in run_path
""",
        )

    def test_a_stack_without_the_users_frames_is_listed(self) -> None:
        """Autograd's own threads have no other."""
        self.assertExpectedInline(
            self.shown(self.stack[:3]),
            """\
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
      torch/_ops.py:1 in __call__
      torch/distributed/distributed_c10d.py:2 in all_gather_into_tensor
      torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:3 in foreach_all_gather
""",
        )

    def test_no_stack(self) -> None:
        self.assertExpectedInline(
            self.shown(()),
            """\
  first: all_gather_into_tensor on the all-gather stream writes bytes 0 to 255 (256 bytes)
      (no Python stack)
""",
        )

    def test_files_below_the_current_directory_are_shown_from_there(self) -> None:
        frame = Frame(file=os.path.join(os.getcwd(), "acme", "unit.py"), line=1, function="unshard")

        self.assertEqual(os.path.join("acme", "unit.py") + ":1 in unshard", str(frame))


class TestJson:
    """Data first: the text is made from it."""

    reuse = hazard(
        HazardKind.REUSE_IN_FLIGHT,
        GATHERING,
        access("write", DEFAULT, site("aten::zero_", 1), offset=4, run=4, repeats=((8, 32), (2, 8))),
        freed=FREE,
        allocated=site("aten::empty", 2),
        then_block=3,
    )

    def test_round_trip(self) -> None:
        again = hazard_from_json(json.loads(json.dumps(self.reuse.to_json())))

        assert self.reuse == again
        assert self.reuse.explain() == again.explain()

    def test_reading_hazards_needs_no_torch(self) -> None:
        program = (
            "import sys, json; from fsdp_conformance.simulator.checker.hazard import hazard_from_json;"
            "print(hazard_from_json(json.load(sys.stdin)).sentence()); assert 'torch' not in sys.modules"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], input=json.dumps(self.reuse.to_json()), capture_output=True, text=True,
            check=True, timeout=DEADLINE_S,
        )  # fmt: skip

        assert self.reuse.sentence() == result.stdout.strip()

    @compiled
    def test_what_the_checker_describes_is_the_same_form(self) -> None:
        m = Machine()
        block = m.allocate()
        m.write(
            m.a, block, 0, 4, [(8, 8)], op="all_gather", label="layers.0", tensor="w", stack=lambda: [("u.py", 3, "f")]
        )
        m.read(m.b, block, op="mm")

        (described,) = map(hazard_from_json, m.checker.hazards())

        assert HazardKind.READ_AFTER_WRITE is described.kind
        assert Site(
            op="all_gather", label="layers.0", tensor="w", stack=(Frame(file="u.py", line=3, function="f"),)
        ) == (described.then.site)
        assert (0, 4, ((8, 8),), 32, 60) == (
            described.then.offset, described.then.run, described.then.repeats, described.then.nbytes,
            described.then.end,
        )  # fmt: skip
        assert Stream(device=0, number=0, name="a") == described.then.stream
        assert described == hazard_from_json(described.to_json())

    @compiled
    def test_two_runs_say_the_same(self) -> None:
        """Streams and blocks are counted within their device, whatever was made on others before."""

        def texts(*, more_devices: int) -> list[str]:
            m = Machine()
            for device in range(1, more_devices + 1):
                m.checker.add_lane("stream", device)
                m.checker.add_block(64, device)
            lane = m.checker.add_lane("stream", 0)
            block, pinned = m.allocate(), m.allocate(pinned=True)
            m.write(lane, block)
            m.read(m.a, block)
            m.write(lane, pinned)
            m.read(HOST, pinned)
            return [hazard_from_json(described).explain() for described in m.checker.hazards()]

        first = texts(more_devices=0)
        assert 2 == len(first)
        assert first == texts(more_devices=5)


def test_a_script_for_cuda_reads_cuda() -> None:
    """The device's name is the script's, also of streams on other devices."""
    elsewhere = replace(GATHERING, stream=replace(GATHER, device=1))
    described = hazard(HazardKind.READ_AFTER_WRITE, elsewhere, MULTIPLYING, device_type="cuda")

    assert described.sentence().startswith("read after write on cuda:0: ")
    assert "the all-gather stream of cuda:1" in described.sentence()
    assert "sim" not in described.explain()
    assert hazard_from_json(described.to_json()) == described
