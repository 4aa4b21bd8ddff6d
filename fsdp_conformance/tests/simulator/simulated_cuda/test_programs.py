"""Programs that were written to be judged: what is wrong is found, for its reason, and what is right passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_conformance.tests.simulator.simulated_cuda.runs import Run, compiled, run_pytest

pytestmark = [compiled, pytest.mark.slow]

#: For all programs of ranks, one after the other: more than eight minutes on a busy machine with two cores.
ALL_DEADLINE_S = 2400

#: What is found in each wrong program on streams, if it is not "read after write".
ON_STREAMS = {
    "test_wrong_overlapping_halves": "write|read after write",
    "test_wrong_ring_of_staging_buffers": "host write in flight",
    "test_wrong_numpy_assignment": "host write in flight",
    "test_wrong_item_of_pinned_scalar": "host read in flight",
    "test_wrong_copy_between_devices_on_side": "write after read",
    "test_wrong_optimizer_on_side": "(write after read|read after write|reuse of memory in flight)",
    "test_wrong_ema_on_side": "write after read",
    "test_wrong_activation_offload": "(read after write|reuse of memory in flight)",
}

#: What is found in each wrong program of ranks.
ON_RANKS = {
    "wrong_barrier_against_reduce": r"operations of a collective differ: rank 0 calls all_reduce\(SUM, 4 float32\) on "
    r"the default group at test_rank_programs.py:\d+ in wrong_\w+, rank 1 calls barrier\(\)",
    "wrong_both_send_first": r"ranks 0 and 1 both send before they receive",
    "wrong_ring_of_sends_of_four": r"the devices of ranks 0, 1, 2, 3 wait for each other",
    "wrong_message_against_reduce": r"the devices of ranks 0, 1 wait for each other, each in a call that others make "
    r"later: rank 0 runs all_reduce\(SUM, 4 float32\) on the default group at test_rank_programs.py:\d+ in \w+; rank 1 "
    r"runs recv",
    "wrong_batch_against_reduce": r"the devices of ranks 0, 1 wait for each other.* rank 1 runs recv",
    "wrong_batch_meets_message": r"the communicators of a message differ: rank 0 calls send\(4 float32\) from rank "
    r"0 to rank 1 on the communicator of the group, the default group at test_rank_programs.py:\d+ in \w+, rank 1",
    "wrong_tags": r"the tags of a message differ: rank 0 calls send\(4 float32, tag 1\)",
    "wrong_groups_of_members_of_four": r"operations of a collective differ: rank \d calls new_group\(",
    "wrong_order_of_groups": r"two communicators are used in different orders",
    "wrong_ddp_hook_on_side": "read after write",
    "wrong_fsdp2_reads_local_on_side": "read after write",
    "wrong_functional_without_wait": "read after write",
    "wrong_gather_read_early": "read after write",
    "wrong_reduce_overlapping_half": "(read|write) after (read|write)",
    "wrong_reduces_if_it_likes": r"rank 1 calls all_reduce\(SUM, 1 float32\).*but rank 0 has ended without calling it",
    "wrong_ring_overwrites": "write after read",
    "wrong_roots": r"roots of a collective differ: rank 0 calls broadcast\(4 float32, root 0\)",
    "wrong_scatter_input_changes": "write after read",
    "wrong_uneven_gather": r"sizes of a collective differ: rank 0 calls all_gather\(4 float32\)",
    "wrong_mesh_of_four": r"reductions of a collective differ: rank 2 calls all_reduce\(SUM, 4 float32\) on "
    r"group \S+ of ranks 2, 3 at .* rank 3 calls all_reduce\(MAX",
    "wrong_pair_order_of_four": r"ranks 0, 1, 2, 3 wait for each other: rank 0 has called all_reduce\(SUM, 4 float32\) "
    r"on group \S+ of ranks 0, 1 at test_rank_programs.py:\d+",
    "wrong_alltoall_of_four": r"split sizes of a collective differ: rank 0 calls all_to_all\(5 float32, to each",
    "wrong_wait_on_another_stream": "(read|write) after (read|write)",
}


@pytest.mark.nightly
def test_programs_on_streams(tmp_path: Path) -> None:
    """Each wrong one fails with its race, and no right one fails."""
    run = run_pytest(tmp_path, "--simulate-cuda=2", files=["stream_programs"])

    assert len(run.outcomes) >= 35, run.out
    for test, outcome in run.outcomes.items():
        assert outcome == ("FAILED" if test.startswith("test_wrong") else "PASSED"), run.section(test) or run.out
    for test in filter(lambda test: test.startswith("test_wrong"), run.outcomes):
        assert re.search(rf"^{ON_STREAMS.get(test, 'read after write')} on ", run.section(test), re.MULTILINE), (
            run.section(test)
        )
    assert ON_STREAMS.keys() < run.outcomes.keys()


def judge_ranks(run: Run, programs: set[str]) -> None:
    """Each wrong program of ranks has failed, for its reason, and no right one has."""
    outcomes = {test.partition("[")[2].rstrip("]"): outcome for test, outcome in run.outcomes.items()}
    assert programs == outcomes.keys(), run.out
    for program, outcome in outcomes.items():
        assert outcome == ("FAILED" if program in ON_RANKS else "PASSED"), run.section(f"test_program[{program}]")
        if program in ON_RANKS:
            section = " ".join(run.section(f"test_program[{program}]").split())  # lines end anywhere
            assert re.search(ON_RANKS[program], section), section


@pytest.mark.slow
@pytest.mark.nightly
def test_programs_of_ranks(tmp_path: Path) -> None:
    """All of them."""
    run = run_pytest(tmp_path, "--simulate-cuda=4", files=["rank_programs"], deadline_s=ALL_DEADLINE_S)
    right = {test.partition("[")[2].rstrip("]") for test in run.outcomes} - ON_RANKS.keys()
    assert len(right) >= 8
    assert all(name.startswith("right_") for name in right), right
    judge_ranks(run, right | ON_RANKS.keys())
