"""
Tests for the conclusions of `sanitize`: hazards are merged over ranks, endings have a status, and checking nothing
never passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from fsdp_conformance import plan
from fsdp_conformance.history.hazard import HazardKind as HistoryHazardKind
from fsdp_conformance.outcome.records import RankError, RankExit, RankReport
from fsdp_conformance.script_ranks.endings import script_end
from fsdp_conformance.simulator import device
from fsdp_conformance.simulator.checker.hazard import Access, Hazard, HazardKind, Site, Stream
from fsdp_conformance.simulator.collectives.disagreement import Disagreement, DisagreementKind, Party
from fsdp_conformance.simulator.frames import Frame
from fsdp_conformance.simulator.sanitize.order import ScriptOrder
from fsdp_conformance.simulator.sanitize.rank_children import ChildOfRank
from fsdp_conformance.simulator.sanitize.report import ExitStatus, ScriptReport, folded
from fsdp_conformance.simulator.suppressions import Suppression, Suppressions
from fsdp_conformance.status import Status

ORDER = ScriptOrder(
    target="train.py", is_module=False, arguments=(), world_size=2, mode="record", as_cuda=False, timeout_s=60.0
)


def access(kind: str, op: str, line: int, *, device: int, stream: int) -> Access:
    """An access from a line of train.py."""
    site = Site(op=op, stack=(Frame(file="train.py", line=line, function="main"),))
    place = Stream(device=device, number=stream, name="stream")
    return Access(kind=kind, stream=place, offset=0, run=16, repeats=(), allocation=1, site=site)


def hazard(*, device: int = 0, line: int = 12, count: int = 1) -> Hazard:
    """A copy on stream 1 that line `line` does not wait for."""
    return Hazard(
        kind=HazardKind.READ_AFTER_WRITE,
        then=access("write", "aten::copy_", 10, device=device, stream=1),
        now=access("read", "aten::mul", line, device=device, stream=0),
        device=device,
        pinned=False,
        block=4,
        nbytes=512 * (device + 1),
        allocated=None,
        freed=None,
        tenant_stream=Stream(device=device, number=1, name="stream"),
        then_block=4,
        then_nbytes=512,
        count=count,
    )


def observed(*hazards: Hazard, accesses: int = 100) -> dict[str, Any]:
    """The report of a rank."""
    return {
        "hazards": [one.to_json() for one in hazards],
        "accesses": accesses,
        "waits": {"StreamWaitsEvent": 3},
        "streams": 2,
        "notes": [],
    }


def report(
    *ranks: dict[str, Any] | None,
    errors: Sequence[RankError | None] = (None, None),
    not_run: str | None = None,
    children: Sequence[Sequence[ChildOfRank]] = (),
    order: ScriptOrder = ORDER,
) -> ScriptReport:
    """A run in which each rank observed that; both ranks said a word."""
    return ScriptReport(
        order,
        observed=ranks,
        end=script_end(
            [RankReport(rank=rank, error=error, not_run=not_run) for rank, error in enumerate(errors)],
            [RankExit(rank=rank, pid=1, exitcode=0, time=1.0, reported=True) for rank in range(2)],
        ),
        seconds=1.0,
        children=children,
    )


def child(
    name: str,
    *hazards: Hazard,
    accesses: int = 10,
    has_ended: bool = True,
    disagreements: Sequence[Disagreement] = (),
) -> ChildOfRank:
    """A process that a rank has started."""
    return ChildOfRank(
        name=name,
        hazards=tuple(one.to_json() for one in hazards),
        accesses=accesses,
        notes=(f"a note of {name}",),
        collectives={"found": list(map(asdict, disagreements))},
        has_ended=has_ended,
    )


def error(text: str, time: float = 0.0, blame: str = "implementation") -> RankError:
    """The error that ended a rank's body."""
    return RankError(kind="builtins.ValueError", message=text, traceback=f"ValueError: {text}", blame=blame, time=time)


def printed(merged: ScriptReport) -> str:
    """Everything that is printed."""
    return "\n".join(text for text, _ in merged.paragraphs())


def test_equal_hazards_of_several_ranks_are_one() -> None:
    """Device, block size and count do not make two hazards different; counts add up."""
    (one,) = folded([observed(hazard(device=0, count=3)), observed(hazard(device=1))])

    assert [0, 1] == one.ranks
    assert one.count == 4


@pytest.mark.parametrize(
    "other",
    [
        hazard(line=13),
        replace(hazard(), kind=HazardKind.WRITE_AFTER_WRITE),
        replace(hazard(), now=access("read", "aten::mul", 12, device=-1, stream=0)),
    ],
    ids=["line", "kind", "host"],
)
def test_other_lines_and_kinds_are_other_hazards(other: Hazard) -> None:
    """Each is told apart, in the order in which they were seen."""
    hazards = folded([observed(hazard(), other), None])

    assert [hazard(), other] == [one.hazard for one in hazards]


def test_two_lines_that_are_come_to_in_several_ways_are_one_hazard() -> None:
    """Other operations on the same line, and other streams, are places of it."""
    other = replace(hazard(), now=access("read", "aten::add", 12, device=0, stream=2))
    merged = report(observed(hazard(), other), observed(hazard(device=1)))

    assert [(hazard(), 2, 3)] == [(one.hazard, len(one.places), one.count) for one in merged.hazards]
    assert "seen: 3 times in 2 places, on ranks 0, 1" in printed(merged)
    assert merged.verdict() == "1 hazard in 2 places, seen 3 times on ranks 0, 1 [exit 1]"


def test_what_children_find_is_found() -> None:
    """Merged with the same hazard of a rank, and with the names of the processes."""
    merged = report(
        observed(hazard(count=2)),
        observed(accesses=0),
        children=[[child("worker.py", hazard())], [child("Process-1", hazard(), has_ended=False), child("Process-2")]],
    )

    (one,) = merged.hazards
    assert (one.count, one.ranks, one.processes) == (4, [0, 1], {"worker.py": 0, "Process-1": 1})
    text = printed(merged)
    assert "seen: 4 times, on ranks 0, 1, in the child processes worker.py, Process-1\n" in text
    assert "checked: 130 accesses on 2 streams of 2 ranks and 3 child processes" in text
    assert "nothing on rank 1" not in text
    assert "note: a note of Process-2" in text
    assert text.count("was killed or outlived it") == 1
    assert [len(rank["children"]) for rank in merged.to_json()["ranks"]] == [1, 2]
    assert merged.to_json()["hazards"][0]["processes"] == {"worker.py": 0, "Process-1": 1}


def test_a_script_whose_children_do_the_work_is_clean() -> None:
    """A finding of a child is a finding of the run."""
    nothing = {**observed(accesses=0), "streams": 0}

    assert report(nothing, nothing).status is ExitStatus.NOTHING_CHECKED
    merged = report(nothing, nothing, children=[[child("worker.py")], []])
    assert merged.status is ExitStatus.CLEAN
    assert merged.verdict().startswith("clean: 10 accesses of 2 ranks and 1 child process, 0 hazards")
    assert report(nothing, nothing, children=[[], [child("worker.py", hazard())]]).status is ExitStatus.FINDINGS


def test_collectives_of_children_are_compared() -> None:
    """Each finding once, although both ranks of the launcher's have it."""
    parties = [Party(rank=rank, words=f"send() from rank {rank}", place=None) for rank in (0, 1)]
    finding = Disagreement.between(DisagreementKind.BOTH_SEND, parties, "")

    merged = report(
        observed(), observed(), children=[[child(f"rank {rank}", disagreements=[finding]) for rank in (0, 1)], []]
    )

    assert merged.status is ExitStatus.FINDINGS
    assert printed(merged).count("ranks 0 and 1 both send before they receive") == 1
    assert "1 finding about collectives of ranks 0, 1 [exit 1]" in printed(merged)


def test_hazards_are_printed_with_both_lines_and_the_ranks() -> None:
    """The text has the two lines of the script, how often, on which ranks, and the verdict last."""
    merged = report(observed(hazard(count=2)), observed(hazard(device=1)))
    text = printed(merged)

    assert ExitStatus.FINDINGS == merged.status
    assert "train.py:10 in main" in text
    assert "train.py:12 in main" in text
    assert "seen: 3 times, on ranks 0, 1" in text
    assert text.endswith("1 hazard in 1 place, seen 3 times on ranks 0, 1 [exit 1]")


def test_a_clean_run_says_how_much_was_checked() -> None:
    """A verdict without the number of accesses would be worth nothing."""
    merged = report(observed(accesses=9171), observed(accesses=9171))

    assert ExitStatus.CLEAN == merged.status
    assert printed(merged).endswith("clean: 18,342 accesses on 2 streams of 2 ranks, 0 hazards [exit 0]")


def test_a_script_that_never_used_the_device_is_not_clean() -> None:
    """Status 2, and what the script should do."""
    merged = report(observed(accesses=0), observed(accesses=0))

    assert ExitStatus.NOTHING_CHECKED == merged.status
    assert "nothing was checked" in merged.verdict()
    assert "--as-cuda" in merged.verdict()


def test_a_rank_that_never_used_the_device_is_named() -> None:
    """The run counts, with a word about the idle rank."""
    merged = report(observed(), observed(accesses=0))

    assert ExitStatus.CLEAN == merged.status
    assert "nothing on rank 1" in printed(merged)


def test_the_first_rank_to_fail_is_the_headline() -> None:
    """Its traceback is shown; the peers' failures follow from it."""
    merged = report(observed(), observed(), errors=(error("later", 2.0), error("boom", 1.0)))
    text = printed(merged)

    assert ExitStatus.SCRIPT_FAILED == merged.status
    assert "✗ the script failed: rank 1 raised ValueError: boom" in text
    assert "then rank 0 raised ValueError: later" in text
    assert text.endswith("the script failed: rank 1 raised ValueError: boom [exit 5]")


def test_hazards_count_before_a_failure() -> None:
    """A script that fails after a hazard may fail because of it."""
    merged = report(observed(hazard()), None, errors=(None, error("loss is nan")))

    assert ExitStatus.FINDINGS == merged.status
    assert "the script failed: rank 1 raised ValueError: loss is nan" in printed(merged)
    assert merged.verdict() == "1 hazard in 1 place, seen once on rank 0; the script failed [exit 1]"


def test_what_fails_before_the_script_begins_is_not_its_doing() -> None:
    """Status 4, and so it says."""
    merged = report(None, None, errors=(error("no such name", blame="suite"), None))

    assert ExitStatus.OWN_ERROR == merged.status
    assert "an error in this suite, not in the script: rank 0 raised ValueError: no such name" in merged.verdict()


def test_what_this_machine_lacks_is_no_finding() -> None:
    """Status 3, with the reason."""
    merged = report(None, None, not_run="no C++ compiler")

    assert ExitStatus.CANNOT_RUN == merged.status
    assert merged.verdict() == "not run: no C++ compiler [exit 3]"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("Torch not compiled with CUDA enabled", "pass --as-cuda before the script's name"),
        ("No module named 'flash_attn'", "GPU kernels only"),
        ("OSError: 100000 requested and 0 written", "pinned memory that a copy is still writing"),
        ("No module named 'triton'", "Triton compiles for GPUs"),
    ],
)
def test_failures_that_have_a_meaning_here_get_a_hint(text: str, hint: str) -> None:
    """The hint stands below the traceback."""
    assert hint in printed(report(observed(), observed(), errors=(error(text), None)))


def test_the_file_holds_what_was_printed() -> None:
    """Verdict, status, hazards with ranks and text, and each rank's counts."""
    data = report(observed(hazard()), observed(hazard(device=1))).to_json()

    assert data["status"] == 1
    assert data["verdict"].endswith("[exit 1]")
    assert [(one["ranks"], one["count"]) for one in data["hazards"]] == [([0, 1], 2)]
    assert "train.py:10" in data["hazards"][0]["text"]
    assert [(one["rank"], one["ending"], one["accesses"]) for one in data["ranks"]] == [
        (0, "finished", 100),
        (1, "finished", 100),
    ]


def test_the_exit_statuses_are_those_of_all_commands() -> None:
    """The simulator has its own list, because it does not import the rest of the package."""
    same = {
        ExitStatus.CLEAN: Status.CERTIFIED,
        ExitStatus.FINDINGS: Status.NOT_CERTIFIED,
        ExitStatus.NOTHING_CHECKED: Status.USAGE,
        ExitStatus.CANNOT_RUN: Status.ENVIRONMENT,
        ExitStatus.OWN_ERROR: Status.SUITE,
        ExitStatus.SCRIPT_FAILED: Status.SCRIPT_FAILED,
    }

    assert [int(one) for one in ExitStatus] == [int(same[one]) for one in ExitStatus]


def test_words_that_the_simulator_shares_with_the_suite() -> None:
    """The device's name and the kinds of hazards: each side has its own definition, and they are equal."""
    assert plan.SIMULATED == device.SIMULATED
    assert [str(kind) for kind in HistoryHazardKind] == [str(kind) for kind in HazardKind]


def suppressing(*lines: str, strict: bool = False) -> ScriptOrder:
    """An order with a file of suppressions with these lines."""
    entries = [Suppression(number, *line.split(":")) for number, line in enumerate(lines, 1)]
    return replace(ORDER, suppressions=Suppressions("known.supp", tuple(entries)), strict_suppressions=strict)


def with_a_race(order: ScriptOrder) -> ScriptReport:
    """A run with a race on both ranks."""
    return report(observed(hazard(count=3)), observed(hazard(device=1)), order=order)


def test_a_suppressed_finding_does_not_change_the_status() -> None:
    """It is named, with the line that matches it."""
    judged = with_a_race(suppressing("race:main", "deadlock:main"))
    text = "\n".join(text for text, _ in judged.paragraphs())

    assert (judged.status, judged.hazards) == (ExitStatus.CLEAN, [])
    assert "suppressed: 1 finding\n  read after write on sim:0" in text
    assert "seen 4 times on ranks 0, 1 [known.supp:1 race:main]" in text
    assert "matched nothing: known.supp:2 deadlock:main" in text
    assert judged.verdict() == "clean: 200 accesses on 2 streams of 2 ranks, 0 hazards, 1 suppressed [exit 0]"
    assert judged.to_json()["suppressed"][0]["lines"] == [1]
    assert judged.to_json()["unmatched_suppressions"] == ["known.supp:2 deadlock:main"]


def test_a_suppression_that_matches_nothing_fails_if_asked() -> None:
    """Without the option it is only reported, and a finding still comes first."""
    judged = with_a_race(suppressing("race:main", "race:old", strict=True))
    assert judged.status is ExitStatus.FINDINGS
    assert judged.verdict() == "nothing new, but 1 suppression matched nothing: remove it [exit 1]"
    assert with_a_race(suppressing("race:main", strict=True)).status is ExitStatus.CLEAN
    assert with_a_race(suppressing("race:old", strict=True)).verdict().startswith("1 hazard in 1 place")


def test_of_two_ways_to_the_same_lines_one_may_be_suppressed() -> None:
    """Hazards are compared before they are merged."""
    through = replace(hazard(), now=replace(hazard().now, site=replace(hazard().now.site, stack=(
        Frame(file="train.py", line=12, function="main"), Frame(file="train.py", line=40, function="evaluate"),
    ))))  # fmt: skip
    judged = report(observed(hazard(), through), None, order=suppressing("race:evaluate"))

    assert judged.status is ExitStatus.FINDINGS
    assert [len(one.places) for one in judged.hazards] == [1]
    assert len(judged.suppressed) == 1


def test_a_suppressed_mismatch_that_stops_the_script_is_a_failure() -> None:
    """The script could not go on; what it says is why."""
    party = Party(rank=0, words="barrier()", place=Frame(file="train.py", line=3, function="main"))
    one = Disagreement.between(DisagreementKind.DIFFERENT, [party, replace(party, rank=1)], "operations")
    mismatch = replace(error("the operations differ"), kind="CollectiveMismatch")
    found = {**observed(), "collectives": {"found": [asdict(one)]}}
    judged = report(found, found, errors=(mismatch, None), order=suppressing("collectives:main"))

    assert judged.status is ExitStatus.SCRIPT_FAILED
    assert "the operations differ" in judged.verdict()
