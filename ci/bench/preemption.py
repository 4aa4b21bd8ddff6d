#!/usr/bin/env python3
"""
Small all-reduces of gloo, when woken threads take a core from others (the usual policy) and when they wait for one.

Ranks are processes of this machine; the second way is what ranks of this project do (SCHED_BATCH, see
`harness.processes.priority`). Both are measured in turn, several times. CPU seconds are those of all ranks, from the
first timed all-reduce to the last. The last line is what the policy saves with the most ranks: seconds with preemption,
divided by seconds without.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_conformance.harness.processes.priority import wake_without_preempting

ELEMENTS = 100
DEADLINE_S = 300.0


def rank_main(rank: int, world_size: int, directory: str, calls: int, waits: bool, answers: Any) -> None:
    """One rank: warm up, then time the calls."""
    if waits:
        wake_without_preempting()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    tensor = torch.ones(ELEMENTS)
    dist.all_reduce(tensor)
    dist.barrier()
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(calls):
        dist.all_reduce(tensor)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    answers.put((seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    dist.barrier()
    dist.destroy_process_group()


def measured(world_size: int, calls: int, waits: bool) -> tuple[float, float]:
    """Seconds of the slowest rank, and CPU seconds of all of them."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (world_size, directory, calls, waits, answers)
        ranks = [context.Process(target=rank_main, args=(rank, *arguments), daemon=True) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        if any(process.exitcode != 0 for process in ranks):
            raise RuntimeError(f"exit statuses of the ranks: {[process.exitcode for process in ranks]}, expected zeros")
    times = [answers.get() for _ in range(world_size)]
    return max(seconds for seconds, _ in times), sum(cpu for _, cpu in times)


def main() -> int:
    """Print the table and the figure."""
    parser = argparse.ArgumentParser(prog=Path(__file__).stem, description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="world sizes (default: 2 4 8)")
    parser.add_argument("--calls", type=int, default=300, help="all-reduces (default: 300)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    options = parser.parse_args()
    if not hasattr(os, "SCHED_BATCH"):
        print("preemption: this system has no policy SCHED_BATCH, which is Linux's", file=sys.stderr)
        return 3
    print(
        f"{options.calls} all-reduces of {ELEMENTS} float32, {os.cpu_count()} cores; medians of {options.rounds} rounds"
    )
    print("ranks   preempting: seconds  CPU s   waiting: seconds  CPU s   ratio")
    ratio = 0.0
    for ranks in options.ranks:
        rounds = [
            (measured(ranks, options.calls, False), measured(ranks, options.calls, True)) for _ in range(options.rounds)
        ]
        (seconds, cpu), (waited, waited_cpu) = (
            tuple(statistics.median(each[way][part] for each in rounds) for part in (0, 1)) for way in (0, 1)
        )
        ratio = statistics.median(each[0][0] / each[1][0] for each in rounds)
        print(f"{ranks:5}   {seconds:19.2f}  {cpu:5.2f}   {waited:16.2f}  {waited_cpu:5.2f}   {ratio:5.1f}")
    print(f"preemption: {ratio:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
