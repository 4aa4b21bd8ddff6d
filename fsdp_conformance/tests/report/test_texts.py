"""The texts that people read, word for word: failures, summaries, explanations, Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from expecttest import TestCase

from fsdp_conformance import contract
from fsdp_conformance.contract.profile import Profile, profile_of
from fsdp_conformance.diagnosis.grouping import grouped
from fsdp_conformance.errors import UsageError
from fsdp_conformance.outcome.records import CaseRecord
from fsdp_conformance.report import markdown
from fsdp_conformance.report.certificate import Certificate, Scope, State
from fsdp_conformance.report.explanation import explain
from fsdp_conformance.report.run_content import RunFile
from fsdp_conformance.report.terminal import (
    basis,
    certificate_text,
    closer,
    duration,
    record_fields,
    render_findings,
    render_record,
    summary_line,
    verdict_words,
)
from fsdp_conformance.tests.report.evidence import a_case, a_finding, a_record, an_exit, stuck
from fsdp_conformance.verdict import Verdict

STACK = """Thread 0x7f (most recent call first):
  File "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 4001 in all_gather_into_tensor
  File "/src/acme_fsdp/unit.py", line 212 in unshard
  File "/src/acme_fsdp/wrap.py", line 40 in forward
"""


def failed(case: str = "R003/rank-coded-ws2", **changes: Any) -> CaseRecord:
    """A gradient that is summed."""
    finding = a_finding(**{"ulps": 4194304.0, **changes})
    return a_record(case, Verdict.FAIL, finding)


def hung() -> CaseRecord:
    """Two ranks in different collectives."""
    likely = "ranks issue different collectives; the last of each: rank 0 all_gather | rank 1 reduce_scatter"
    exits = [
        stuck(0, last_collectives=["forward all_gather 1024B float32 [0,1]"], stack=STACK),
        an_exit(1, reported=True),
    ]
    finding = a_finding(
        "R067", check="deadline", message="rank 0 did not answer", step=None, phase=None, fqn=None, element=None,
        got=None, expected=None, ratio=None, bound=None, differing=None, elements=None, likely=likely,
    )  # fmt: skip
    return a_record(
        "R067/uneven-ws2", Verdict.HANG, finding, reason="rank 0 did not answer within its deadline and was ended",
        exits=exits, consequences=["rank 1 raised RuntimeError: Connection closed by peer"],
    )  # fmt: skip


def a_certificate(**changes: Any) -> Certificate:
    """Not given, for two reasons."""
    fields: dict[str, Any] = {
        "certified": False,
        "private": False,
        "profile": "core-2026.11",
        "scopes": (
            Scope(names=("base",), state=State.FAILED, cases=3, passed=1, example="R003/rank-coded-ws2"),
            Scope(names=("offload",), state=State.PASSED, cases=1, passed=1),
            Scope(names=("hybrid",), state=State.DECLINED, cases=1, passed=0, example="R151/groups-ws4"),
        ),
        "subject": {
            "implementation": "acme-fsdp",
            "version": "0.4.1",
            "adapter": "ada9" * 16,
            "suite": "0.1.0",
            "suite_sha256": "5417" * 16,
            "torch": "2.13.0",
            "python": "3.12.1",
        },
        "declarations": ("padding: up to 15% more bytes on the wire than the shards have",),
        "unobserved": ("R000", "R131"),
        "reasons": ("FAIL: R003/rank-coded-ws2", "HANG: R067/uneven-ws2"),
        "remarks": ("1 case was not run: this machine cannot tell",),
        "counts": {"PASS": 2, "NOT_RUN_ENV": 1, "FAIL": 1, "HANG": 1},
        "executed": 5,
        "expected": 5,
        "status": 1,
    }
    return Certificate(**{**fields, **changes})


def a_run(records: Sequence[CaseRecord], **changes: Any) -> RunFile:
    """A run of acme-fsdp."""
    header = {
        "implementation": {"name": "acme-fsdp", "version": "0.4.1", "capabilities": []},
        "environment": {"torch": "2.13.0", "device": "cpu", "python": "3.12.1"},
    }
    return RunFile(path="run.jsonl", header=header, records=list(records), footer={"seconds": 108.0}, **changes)


#: expecttest writes ASCII alone.
SIGNS = {"✗": "(FAIL)", "⧗": "(HANG)", "☠": "(CRASH)", "✓": "(PASS)", " · ": " | "}


class Texts(TestCase):
    """Golden texts. EXPECTTEST_ACCEPT=1 rewrites them."""

    maxDiff = None

    def assertText(self, text: str, expected: str) -> None:
        """The text, with signs in words."""
        for sign, word in SIGNS.items():
            text = text.replace(sign, word)
        self.assertExpectedInline(text, expected, skip=1)

    def test_a_finding_is_an_argument(self) -> None:
        """Requirement, case, place, figures, cause, next step, and how to run it again."""
        self.assertText(
            render_record(failed()),
            """\
(FAIL) R003  The gradient is the mean over the data-parallel ranks
    harm      trains silently wrong
    case      R003/rank-coded-ws2
    first     step 0 | reduce | '0.weight' | rank 0 | element [3, 1]
    got       1.0 | expected 0.5 | ratio 2 | 4.1943e+06 ulps | on 16 of 16 elements (bitwise)
    seen      gradient of '0.weight': expected 0.5, got 1.0 [gradient parity]
    likely    gradients are summed, not averaged
    look at   The ratio got / expected: the world size means summed, its inverse means divided twice, another constant
              means a wrong group or divisor.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R003/rank-coded-ws2
    closer    fsdp-conformance debug R003/rank-coded-ws2 --implementation torch-fsdp2""",
        )

    def test_the_command_for_a_closer_look_can_be_pasted(self) -> None:
        """It has every option of the run. What no suite has, or no process ran, has no such command."""
        options = "--implementation 'my adapter.py:Mine' --device sim --stress --stress-seed 3"
        repro = f"fsdp-conformance run {options} --case R003/rank-coded-ws2"
        expected = f"fsdp-conformance debug R003/rank-coded-ws2 {options}"
        self.assertEqual(expected, closer(replace(failed(), repro=repro)))
        self.assertEqual("", closer(replace(failed(), repro=repro, ranks="simulated")))
        for other in ("python -m pytest explored.py", "", "fsdp-conformance run --implementation 'a"):
            self.assertEqual("", closer(replace(failed(), repro=other)))

    def test_the_command_that_shows_all_names_the_run(self) -> None:
        """By its directory; without a run file there is no such command."""
        record = failed()
        record.findings *= 2

        for run, shown in (
            ("my results/run.jsonl", "--report 'my results'"), ("other.jsonl", "--report other.jsonl"), ("", ""),
        ):  # fmt: skip
            texts = [one.text for one in record_fields(record, run=run)]
            commands = [text for text in texts if text.startswith("fsdp-conformance explain ")]
            assert commands == ([f"fsdp-conformance explain {record.case} {shown}"] if shown else [])

    def test_a_hang_shows_where_each_rank_waits(self) -> None:
        """The innermost frame that is not machinery, and the last collective."""
        self.assertText(
            render_record(hung()),
            """\
(HANG) R067  All ranks issue the same collectives   HANG
    harm      hangs
    case      R067/uneven-ws2
    first     rank 0
    seen      rank 0 did not answer [deadline]
    rank 0    last: forward all_gather 1024B float32 [0,1] at unit.py:212 in unshard
    rank 1    had finished
    then      rank 1 raised RuntimeError: Connection closed by peer
    likely    ranks issue different collectives; the last of each: rank 0 all_gather | rank 1 reduce_scatter
    look at   The line where each rank waits: a collective that some ranks skip, issue in another order, or on another
              group.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R067/uneven-ws2
    closer    fsdp-conformance debug R067/uneven-ws2 --implementation torch-fsdp2""",
        )

    def test_a_crash_shows_what_followed_from_it(self) -> None:
        """The text has the first three consequences."""
        finding = a_finding(
            "R001", check="process end", message="rank 1 died of SIGSEGV before its report was in", rank=1, step=None,
            phase=None, fqn=None, element=None, got=None, expected=None, ratio=None, likely=None,
        )  # fmt: skip
        record = a_record(
            "R001/probe-ws4",
            Verdict.CRASH,
            finding,
            consequences=[f"rank {rank} lost its peer" for rank in (0, 2, 3, 4)],
        )
        self.assertText(
            render_record(record),
            """\
(CRASH) R001  Losses equal DDP's   CRASH
    harm      raises or crashes where it should work
    case      R001/probe-ws4
    first     rank 1
    seen      rank 1 died of SIGSEGV before its report was in [process end]
    then      rank 0 lost its peer
    then      rank 2 lost its peer
    then      rank 3 lost its peer
    look at   What rank 1 printed, and its last collectives, which `explain` shows: native code, an exit that the engine
              calls, or the system ending a process that takes too much memory.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws4
    closer    fsdp-conformance debug R001/probe-ws4 --implementation torch-fsdp2""",
        )

    def test_the_finding_that_says_most_is_shown(self) -> None:
        """The first divergence is still there, in one line."""
        loss = a_finding(
            "R001", check="loss parity", message="loss: expected 1.5, got 1.75", phase="forward", fqn="micro-batch 0",
            element=None, ratio=None, ulps=None, differing=None, elements=None, likely=None,
        )  # fmt: skip
        gradient = a_finding(likely="computed in bfloat16: with parameters that were rounded to it")
        self.assertText(
            render_record(a_record("R003/rank-coded-ws2", Verdict.FAIL, loss, gradient)),
            """\
(FAIL) R003  The gradient is the mean over the data-parallel ranks
    harm      trains silently wrong
    case      R003/rank-coded-ws2
    first     step 0 | forward | 'micro-batch 0' | rank 0 | loss: expected 1.5, got 1.75
    shown at  step 0 | reduce | '0.weight' | rank 0 | element [3, 1]
    got       1.0 | expected 0.5 | ratio 2 | on 16 of 16 elements (bitwise)
    seen      gradient of '0.weight': expected 0.5, got 1.0 [gradient parity]
    likely    computed in bfloat16: with parameters that were rounded to it
    look at   The ratio got / expected: the world size means summed, its inverse means divided twice, another constant
              means a wrong group or divisor.
    and       1 more finding
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R003/rank-coded-ws2
    closer    fsdp-conformance debug R003/rank-coded-ws2 --implementation torch-fsdp2""",
        )

    def test_an_exception_has_its_own_advice(self) -> None:
        """The advice depends on whether the exception depends on the rank."""
        alone = a_finding(
            "R001", check="training", message="rank 1 raised ValueError: 13 elements", rank=1, step=None, phase=None,
            fqn=None, element=None, got=None, expected=None, ratio=None, ulps=None, likely="only rank 1 raised: the "
            "others lost it as a peer, or had gone on", bound=None, differing=None, elements=None,
        )  # fmt: skip
        same = replace(alone, likely="every rank raised: the same exception")
        records = [a_record("R001/probe-ws4", Verdict.FAIL, finding) for finding in (alone, same)]
        self.assertText(
            "\n\n".join(render_record(record) for record in records),
            """\
(FAIL) R001  Losses equal DDP's
    harm      raises or crashes where it should work
    case      R001/probe-ws4
    first     rank 1
    seen      rank 1 raised ValueError: 13 elements [training]
    likely    only rank 1 raised: the others lost it as a peer, or had gone on
    look at   The exception's message, and what is different on rank 1: its shards, its batch, a branch on the rank.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws4
    closer    fsdp-conformance debug R001/probe-ws4 --implementation torch-fsdp2

(FAIL) R001  Losses equal DDP's
    harm      raises or crashes where it should work
    case      R001/probe-ws4
    first     rank 1
    seen      rank 1 raised ValueError: 13 elements [training]
    likely    every rank raised: the same exception
    look at   The exception's message. `explain` shows what the ranks did before.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws4
    closer    fsdp-conformance debug R001/probe-ws4 --implementation torch-fsdp2""",
        )

    def test_an_option_that_ddp_lacks_is_the_adapters(self) -> None:
        """Its message is long and says it in the middle."""
        message = "rank 0 raised RuntimeError: Expected ... the keyword argument `find_unused_parameters=True` to"
        record = a_record("R117/unused-ws2", Verdict.FAIL, a_finding("R117", check="training", message=message))

        assert "look at   How the adapter wraps the model: DistributedDataParallel needs" in render_record(record)

    def test_cases_that_name_one_of_several_causes_belong_together(self) -> None:
        """Two ranks name two causes, three name one of them: the one to read."""
        both = "summed over ranks instead of averaged, or counted twice: got / expected = 2"
        one = "summed over ranks instead of averaged: got / expected = 3"
        (group,) = grouped([failed("R003/x-ws2", likely=both), failed("R003/x-ws3", likely=one)])

        self.assertEqual(("R003/x-ws3", ["R003/x-ws2"]), (group.first.case, [item.case for item in group.others]))

    def test_an_error_of_the_suite_has_a_reason(self) -> None:
        """There is no finding."""
        record = a_record("R001/probe-ws2", Verdict.ERROR_SUITE, reason="rank 1 compared nothing")
        self.assertText(
            render_record(record),
            """\
! R001  Losses equal DDP's   ERROR_SUITE
    case      R001/probe-ws2
    reason    rank 1 compared nothing
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R001/probe-ws2""",
        )

    def test_what_failed_alike_is_said_once(self) -> None:
        """The smallest world stands for all; the largest group comes first."""
        sums = [failed(f"R003/rank-coded-ws{size}") for size in (4, 3, 2, 8, 7, 6)]
        self.assertText(
            render_findings([hung(), *sums, a_record()]),
            """\
(FAIL) R003  The gradient is the mean over the data-parallel ranks
    harm      trains silently wrong
    case      R003/rank-coded-ws2
    first     step 0 | reduce | '0.weight' | rank 0 | element [3, 1]
    got       1.0 | expected 0.5 | ratio 2 | 4.1943e+06 ulps | on 16 of 16 elements (bitwise)
    seen      gradient of '0.weight': expected 0.5, got 1.0 [gradient parity]
    likely    gradients are summed, not averaged
    look at   The ratio got / expected: the world size means summed, its inverse means divided twice, another constant
              means a wrong group or divisor.
    same in   5 more cases: R003/rank-coded-ws3, R003/rank-coded-ws4, R003/rank-coded-ws6, R003/rank-coded-ws7 and 1
              more
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R003/rank-coded-ws2
    closer    fsdp-conformance debug R003/rank-coded-ws2 --implementation torch-fsdp2

(HANG) R067  All ranks issue the same collectives   HANG
    harm      hangs
    case      R067/uneven-ws2
    first     rank 0
    seen      rank 0 did not answer [deadline]
    rank 0    last: forward all_gather 1024B float32 [0,1] at unit.py:212 in unshard
    rank 1    had finished
    then      rank 1 raised RuntimeError: Connection closed by peer
    likely    ranks issue different collectives; the last of each: rank 0 all_gather | rank 1 reduce_scatter
    look at   The line where each rank waits: a collective that some ranks skip, issue in another order, or on another
              group.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R067/uneven-ws2
    closer    fsdp-conformance debug R067/uneven-ws2 --implementation torch-fsdp2""",
        )

    def test_the_summary_has_a_denominator(self) -> None:
        """It also shows how much of it was executed."""
        self.assertText(
            summary_line(a_certificate(), seconds=108.0) + "\n" + certificate_text(a_certificate()),
            """\
NOT CERTIFIED  core-2026.11   2 PASS | 1 NOT_RUN_ENV | 1 FAIL | 1 HANG   5 of 5 cases reported   1 min 48 s
  not certified because: FAIL: R003/rank-coded-ws2
  not certified because: HANG: R067/uneven-ws2
  declined: hybrid
  passed: offload
  declared: padding: up to 15% more bytes on the wire than the shards have
  note: 1 case was not run: this machine cannot tell""",
        )

    def test_a_certificate_says_for_what_and_on_what_it_rests(self) -> None:
        """Scopes, what was not observed, what was judged."""
        base = Scope(names=("base",), state=State.PASSED, cases=3, passed=3)
        given = a_certificate(
            certified=True,
            scopes=(base, *a_certificate().scopes[1:]),
            reasons=(),
            remarks=(),
            counts={"PASS": 5},
            status=0,
        )
        self.assertText(
            summary_line(given, seconds=4.04) + "\n" + certificate_text(given),
            """\
CERTIFIED base + offload (1 of 2 extensions)  core-2026.11   5 PASS   5 of 5 cases reported   4.0 s
  declined: hybrid
  passed: offload
  mandatory, but not observed: R000, R131
  judged: acme-fsdp 0.4.1, adapter ada9ada9ada9, by suite 0.1.0 541754175417, torch 2.13.0, Python 3.12.1
  declared: padding: up to 15% more bytes on the wire than the shards have""",
        )

    def test_combinations_are_counted_and_those_not_passed_are_named(self) -> None:
        """By state, with an example of what failed; nothing is said of those that were left out."""
        pairs = [
            (("a", "b"), State.PASSED, ""),
            (("a", "c"), State.DECLINED, "R001/x-ws2"),
            (("b", "c"), State.DECLINED, "R001/x-ws2"),
            (("c", "d"), State.FAILED, "R001/y-ws2"),
            (("d", "e"), State.LEFT_OUT, "R001/z-ws2"),
        ]
        scopes = tuple(
            Scope(names=names, state=state, cases=1, passed=state is State.PASSED, example=example)
            for names, state, example in pairs
        )

        self.assertEqual(
            "combinations passed: 1 of 5; failed: c + d (R001/y-ws2); declined: a + c, b + c",
            basis(a_certificate(scopes=scopes))[0],
        )

    def test_many_extensions_are_counted(self) -> None:
        """The line stays a line."""
        scopes = [Scope(names=(name,), state=State.PASSED, cases=1, passed=1) for name in ("base", *"abcdef")]
        given = a_certificate(certified=True, scopes=tuple(scopes), counts={"PASS": 7})

        self.assertEqual("CERTIFIED base + 6 of 6 extensions", verdict_words(given))

    def test_a_requirement_is_explained(self) -> None:
        """Sentence, level, how it is seen, where to look, what pins it, its cases with their verdicts."""
        self.assertText(
            explain("R067", contract.load(), a_profile(), a_run([hung()])),
            """\
R067  All ranks issue the same collectives

requires    All members of a group issue the same sequence of collectives (operation, bytes, dtype), even if a rank has
            empty shards, unused units, no gradients, or a different number of trainable tensors.
level       M: MUST
chapter     G. Communication schedule and volume
observed by collectives recorded at the process group
look at     A collective issued under a condition that differs between ranks.
source      pytorch test_fsdp_sharded_grad_scaler.py::test_fsdp_ddp_parity_with_grad_scaler (NonUniformReqGradNWM)
source      pytorch test_fsdp_use_orig_params.py::test_non_uniform_requires_grad
source      deepspeed test_zero.py::TestZeroUnbalancedGradients
source      pytorch#170667
cases       1 of core-2026.11:
            R067/uneven-ws2   (HANG) HANG

(HANG) R067  All ranks issue the same collectives   HANG
    harm      hangs
    case      R067/uneven-ws2
    first     rank 0
    seen      rank 0 did not answer [deadline]
    rank 0    last: forward all_gather 1024B float32 [0,1] at unit.py:212 in unshard
    rank 1    had finished
    then      rank 1 raised RuntimeError: Connection closed by peer
    likely    ranks issue different collectives; the last of each: rank 0 all_gather | rank 1 reduce_scatter
    look at   The line where each rank waits: a collective that some ranks skip, issue in another order, or on another
              group.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R067/uneven-ws2
    closer    fsdp-conformance debug R067/uneven-ws2 --implementation torch-fsdp2""",
        )

    def test_a_requirement_is_explained_without_a_run(self) -> None:
        """Flags with their sentences."""
        self.assertText(
            explain("R093", contract.load(), a_profile()),
            """\
R093  Deferred reduction equals one batch, in any interleaving

requires    Micro-batches under deferred reduction followed by a synchronised one equal one batch, in any interleaving
            (3 deferred, 3 synchronised, 3 deferred, 1 synchronised).
level       C: MUST if declared
chapter     J. Gradient accumulation
observed by full parameters or gradients under original names, through the adapter
flag        no_sync: The reduction of gradients can be deferred to the last micro-batch.
look at     Local gradients that are dropped, reduced twice, or averaged with the wrong divisor when reduction resumes.
source      pytorch test_fsdp_grad_acc.py::test_grad_acc
cases       1 of core-2026.11:
            R093/probe-ws2""",
        )

    def test_a_case_is_explained(self) -> None:
        """The text has what it expects and binds, and everything that the run has on it."""
        record = hung()
        record.notes, record.measurements = ["a shim was used"], {"held_bytes": {"rank 0": 10}}
        record.traceback, record.schedule = "Traceback: boom\n", ["forward all_gather"]
        text = explain("R067/uneven-ws2", contract.load(), a_profile(), a_run([record]))
        self.assertText(
            text,
            """\
R067/uneven-ws2

expects     All ranks issue the same collectives.
binds       R067 (M) All ranks issue the same collectives
binds       R122 (M) Uneven and empty shards
ranks       2
verdict     (HANG) HANG rank 0 did not answer within its deadline and was ended
compared    0 comparisons of 0 elements, 0.5 s
note        a shim was used
measured    held_bytes = {'rank 0': 10}
headline    R067 (deadline): rank 0 did not answer [rank 0]
likely      ranks issue different collectives; the last of each: rank 0 all_gather | rank 1 reduce_scatter
look at     The line where each rank waits: a collective that some ranks skip, issue in another order, or on another
            group.
finding     R067 (deadline): rank 0 did not answer [rank 0]
then        rank 1 raised RuntimeError: Connection closed by peer

-- traceback of the first rank that raised
Traceback: boom

-- stacks of rank 0
Thread 0x7f (most recent call first):
  File "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 4001 in all_gather_into_tensor
  File "/src/acme_fsdp/unit.py", line 212 in unshard
  File "/src/acme_fsdp/wrap.py", line 40 in forward

-- last collectives of rank 0
forward all_gather 1024B float32 [0,1]

-- collectives of rank 0
forward all_gather

repro: fsdp-conformance run --implementation torch-fsdp2 --case R067/uneven-ws2
closer: fsdp-conformance debug R067/uneven-ws2 --implementation torch-fsdp2""",
        )

    def test_a_run_in_markdown(self) -> None:
        """The page that a nightly job shows."""
        records = [a_record(), a_record("R017/x-ws2", Verdict.NOT_RUN_ENV, chapter="B"), failed(), hung(), a_record()]
        self.assertText(
            markdown.summary(a_run(records), a_certificate()),
            """\
### (FAIL) acme-fsdp 0.4.1: NOT CERTIFIED

core-2026.11 | 5 of 5 cases | torch 2.13.0 | device cpu | python 3.12.1 | 1 min 48 s

> **(FAIL) R003  The gradient is the mean over the data-parallel ranks (1 case): trains silently wrong**
> <br>step 0 | reduce | '0.weight' | rank 0 | element \\[3, 1\\]
> <br>gradient of '0.weight': expected 0.5, got 1.0 \\[gradient parity\\]
> <br>likely: gradients are summed, not averaged

harm: trains silently wrong 1 | hangs 1


| chapter | PASS | NOT_RUN_ENV | FAIL | HANG |
|---|---:|---:|---:|---:|
| A. Numerical parity with DDP | 2 |  | 1 | 1 |
| B. Init modes and device placement |  | 1 |  |  |

- FAIL: R003/rank-coded-ws2
- HANG: R067/uneven-ws2
- declined: hybrid
- passed: offload
- declared: padding: up to 15% more bytes on the wire than the shards have
- note: 1 case was not run: this machine cannot tell

**What is wrong** (2)

<details><summary>(FAIL) R003  The gradient is the mean over the data-parallel ranks (1 case)</summary>

```text
(FAIL) R003  The gradient is the mean over the data-parallel ranks
    harm      trains silently wrong
    case      R003/rank-coded-ws2
    first     step 0 | reduce | '0.weight' | rank 0 | element [3, 1]
    got       1.0 | expected 0.5 | ratio 2 | 4.1943e+06 ulps | on 16 of 16 elements (bitwise)
    seen      gradient of '0.weight': expected 0.5, got 1.0 [gradient parity]
    likely    gradients are summed, not averaged
    look at   The ratio got / expected: the world size means summed, its inverse means divided twice, another constant
              means a wrong group or divisor.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R003/rank-coded-ws2
    closer    fsdp-conformance debug R003/rank-coded-ws2 --implementation torch-fsdp2
```

</details>

<details><summary>(HANG) R067  All ranks issue the same collectives   HANG (1 case)</summary>

```text
(HANG) R067  All ranks issue the same collectives   HANG
    harm      hangs
    case      R067/uneven-ws2
    first     rank 0
    seen      rank 0 did not answer [deadline]
    rank 0    last: forward all_gather 1024B float32 [0,1] at unit.py:212 in unshard
    rank 1    had finished
    then      rank 1 raised RuntimeError: Connection closed by peer
    likely    ranks issue different collectives; the last of each: rank 0 all_gather | rank 1 reduce_scatter
    look at   The line where each rank waits: a collective that some ranks skip, issue in another order, or on another
              group.
    repro     fsdp-conformance run --implementation torch-fsdp2 --case R067/uneven-ws2
    closer    fsdp-conformance debug R067/uneven-ws2 --implementation torch-fsdp2
```

</details>


This shows the presence, not the absence, of defects.
""",
        )


def a_profile() -> Profile:
    """Three cases."""
    return profile_of(
        "core-2026.11",
        [
            a_case(id="R067/uneven-ws2", requirements=("R067", "R122"), title="All ranks issue the same collectives."),
            a_case(requirements=["R093"], needs=("no_sync",)),
            a_case(id="R017/device-ws2", requirements=("R017",), environment=("cuda",), title="Needs a device."),
        ],
    )


# What goldens do not show.


def test_signs_of_success_are_in_the_markdown() -> None:
    """A certificate that is given."""
    given = a_certificate(certified=True, reasons=(), remarks=(), status=0)

    assert markdown.summary(a_run([a_record()]), given).startswith("### ✓ acme-fsdp 0.4.1: CERTIFIED ")


def test_an_aborted_run_is_marked_in_the_markdown() -> None:
    """There is no footer."""
    run = a_run([])
    run.footer = None

    assert "**aborted**" in markdown.summary(run, a_certificate())


def test_markdown_is_not_broken_by_what_was_found() -> None:
    """Fences inside fences, and cells inside cells."""
    text = markdown.summary(a_run([failed(message="``` oops")]), a_certificate(reasons=("a | b <c>",)))

    assert "``` oops" not in text
    assert "- a \\| b &lt;c&gt;" in text


def test_many_groups_are_cut_in_the_markdown() -> None:
    """The run file has the rest."""
    records = [failed(f"R003/probe{number}-ws2", likely=f"cause {number}") for number in range(25)]

    assert "... and 5 more; see the run file." in markdown.summary(a_run(records), a_certificate())


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.94, "9.9 s"), (48.4, "48 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    """They have no more digits than matter."""
    assert duration(seconds) == text


def test_cases_of_other_causes_are_other_groups() -> None:
    """They are, even with the same requirement and check."""
    records = [failed(), failed("R003/other-ws2", likely="divided twice")]

    assert len(grouped(records)) == 2


def test_cases_without_a_likely_cause_are_grouped_by_phase() -> None:
    """The phase is what is known."""
    same = [failed(likely=None), failed("R003/other-ws2", likely=None)]
    unlike = failed("R003/late-ws2", likely=None, phase="step")

    assert [len(group.others) for group in grouped([*same, unlike])] == [1, 0]


def test_what_is_no_failure_is_in_no_group() -> None:
    """Passes and what was not judged."""
    quiet = (Verdict.PASS, Verdict.UNSUPPORTED, Verdict.NOT_RUN_ENV, Verdict.DISABLED)

    assert grouped([a_record(verdict=verdict) for verdict in quiet]) == []


def test_an_unknown_requirement_has_a_headline() -> None:
    """A run file of another version may name one."""
    assert "R999  (not in this contract)" in render_record(a_record("R999/x-ws2", Verdict.ERROR_SUITE))


def test_every_verdict_can_be_rendered() -> None:
    """None is forgotten among the signs."""
    for verdict in Verdict:
        assert render_record(a_record("R001/probe-ws2", verdict)) != ""


def test_an_unknown_subject_suggests_near_ones() -> None:
    """Requirements and cases alike."""
    with pytest.raises(UsageError, match=r"got 'R067/unven-ws2'\. Did you mean R067/uneven-ws2"):
        explain("R067/unven-ws2", contract.load(), a_profile())


def test_a_case_that_was_not_run_says_so() -> None:
    """The run is at hand, and has nothing on it."""
    assert "verdict     none: the run did not include this case" in explain(
        "R093/probe-ws2", contract.load(), a_profile(), a_run([])
    )


def test_the_cases_of_a_method_are_folded() -> None:
    """By method and world size, with the verdicts of a run; failures are listed one by one."""
    matrix = [
        a_case(id=f"R005/degree-{name}-ws{size}", requirements=("R005", "R003"), world_size=size, title="Degrees.")
        for name in ("full", "grad-optim") for size in (2, 4)
    ]  # fmt: skip
    once = [a_case(id=f"R003/once-ws{size}", requirements=("R003",), world_size=size) for size in (2, 3, 4)]
    alone = [a_case(id="R008/alone-ws2", requirements=("R008", "R003"), title="Alone.")]
    profile = profile_of("some", [*matrix, *once, *alone])
    records = [a_record(case.id, requirements=["R003"]) for case in (*matrix[1:], *alone)]
    records.append(a_record(matrix[0].id, Verdict.HANG, requirements=["R005"]))

    without = explain("R003", contract.load(), profile)
    assert without.endswith(
        "cases       8 of some:\n"
        "            R003/once-ws{2,3,4}   3 cases\n"
        "            R005/degree-*-ws{2,4}   4 cases\n"
        "            R008/alone-ws2"
    )
    assert explain("R003", contract.load(), profile, a_run(records)).endswith(
        "cases       8 of some:\n"
        "            R003/once-ws{2,3,4}   3 cases\n"
        "            R005/degree-*-ws{2,4}   4 cases   ⧗ 3 PASS · 1 HANG\n"
        "              R005/degree-full-ws2   ⧗ HANG\n"
        "            R008/alone-ws2   ✓ PASS"
    )


def test_a_case_of_another_profile_is_explained_from_the_run() -> None:
    """The run's own data is shown."""
    text = explain("R003/rank-coded-ws2", contract.load(), a_profile(), a_run([failed()]))

    assert "profile     not a case of core-2026.11" in text
    assert "likely      gradients are summed" in text.split("finding ")[0]
