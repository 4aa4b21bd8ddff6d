"""
A rank's process, from its first line to its last.

The order of steps matters. The process leaves the controller's session, receives its order, sends its output and its
stacks to files, applies variables, seeds and settings, and only then imports the test class and runs it. At the end it
leaves by `os._exit`.

Why `os._exit`: a process that goes through Python's finalization sometimes dies of SIGABRT, "terminate called without
an active exception" (1 in 20 to 60 runs of three ranks that use DDP, FSDP1 and FSDP2, torch 2.13). gloo's worker thread
releases the last all-reduce a moment after its caller has the result, and the thread-local state kept by the work holds
a Python object, so the thread asks for the interpreter's lock. Once finalization has begun, CPython up to 3.13 ends a
thread that asks: by `pthread_exit`, whose unwinding meets a destructor that may not throw, and terminates the process
(pytorch#190489, pytorch#179291). `destroy_process_group` before the end does not help while a DDP reducer or a mesh
still holds the group.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import context, devices, rank_startup
from fsdp_conformance.harness.context import RankContext
from fsdp_conformance.harness.environment import apply_collective_timeout, apply_variables
from fsdp_conformance.harness.order import RankFiles, RankOrder, decode
from fsdp_conformance.harness.processes import foreground, preload
from fsdp_conformance.harness.processes.priority import keep_priority, wake_without_preempting
from fsdp_conformance.harness.processes.stacks import STACK_SIGNAL
from fsdp_conformance.harness.rank import ERROR_EXIT_CODE, RankRun, destroy_process_group
from fsdp_conformance.harness.torchrun import worker as torchrun

#: The message of a rank that has got ready before its case, and the question that it gets before the case.
READY, ASKED = b"ready", b"still there?"

#: faulthandler needs the file for the life of the process.
_stack_file: Any = None


class _ProcessRun(RankRun):
    """One case on a rank that is a process."""

    start = "forkserver"

    def prepare(self) -> None:
        """Take over streams, environment and deadlines."""
        prepare_process(self.order)
        if self.order.case.is_debugged(self.order.rank):
            foreground.take_terminal(self.pipe)
            foreground.announce_prompts(self.tell_prompt)
        elif self.order.case.debugged is not None:
            foreground.ignore_breakpoints()
        context.log().trace_to(self.order.files.collectives, devices.marker(self.order.case.device_type))

    def examine(self, error: BaseException) -> None:
        """Open pdb, if that was asked for."""
        debugged = self.order.case.debugged
        if debugged is not None and debugged.post_mortem and debugged.rank == self.order.rank:
            foreground.examine(error)


def main(pipe: Connection, directory: Path) -> NoReturn:
    """
    The whole life of a rank: one case, or as many as the pipe brings if its cases accept reused ranks.

    `directory` is that of the first case, which must not outlive a controller that ends before it has sent an order.
    """
    enter(directory)
    (order,) = first_orders(pipe, directory)
    start = "forkserver"
    if order.case.ahead:
        order, start = _get_ready(order, pipe, directory), "prepared"
    while True:
        run = _ProcessRun(order, pipe)
        run.start, run.has_group = start, start == "prepared"
        context.switch_to(RankContext(run))
        code = run.run()
        if code or not order.case.reuse:
            leave(code, pipe)
        # Before the rank says that it is idle: after that, the next case may begin at any time.
        _forget_case()
        start = "reused"
        pipe.send_bytes(json.dumps({"idle": True}).encode())
        try:
            (order,) = decode(pipe.recv_bytes())
        except EOFError:
            leave(0, pipe)


def _get_ready(order: RankOrder, pipe: Connection, directory: Path) -> RankOrder:
    """Prepare all that needs no case, report it, and wait for a case. A rank that fails here is not blamed."""
    try:
        prepare_process(order)
        rank_startup.get_ready(order)
    except BaseException:  # noqa: BLE001 - a rank that has a case will say it again
        traceback.print_exc()
        leave(ERROR_EXIT_CODE, pipe)
    pipe.send_bytes(READY)
    # A case asks a rank that has waited if it is still there before it sends the order: a killed one never answers.
    _next_message(pipe, directory)
    pipe.send_bytes(READY)
    (order,) = first_orders(pipe, directory)
    return order


def first_orders(pipe: Connection, directory: Path) -> Sequence[RankOrder]:
    """The orders that a new process waits for. If its controller ends first, remove the case's files and leave."""
    return decode(_next_message(pipe, directory))


def _next_message(pipe: Connection, directory: Path) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:
        remove_directory(directory)
        leave(0, pipe)


def prepare_process(order: RankOrder) -> None:
    """
    Take over streams, environment and deadlines.

    Raises EnvironmentUnavailable for a rank on a GPU if the warm process has touched CUDA.
    """
    _redirect(order.files)
    apply_variables(order.environment)
    if preload.cuda_initialised_by is not None and order.case.device_type == "cuda":
        raise EnvironmentUnavailable(
            f"importing {preload.cuda_initialised_by} initialised CUDA in the warm process, so no rank can use "
            "a GPU. Move the call that touches the GPU out of the module's top level, into a function."
        )
    case = order.case
    apply_collective_timeout(case.collective_timeout_s)
    if case.worker is not None:
        torchrun.meet_peers(case.worker, case.name, order.rank, case.world_size)


def _forget_case() -> None:
    """Undo what a case leaves in a process: groups, compiled code, torch's defaults, the rank's context."""
    context.log().trace_to(None)
    context.switch_to(RankContext())
    destroy_process_group()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)


def enter(directory: Path) -> None:
    """Leave the controller's session, but end, and remove the case's directory, when the controller ends."""
    # Ctrl-C then reaches only the controller, which ends its ranks, and what a rank has started can be ended with its
    # process group.
    os.setsid()
    keep_priority()
    wake_without_preempting()
    # Nothing that the warm process imported is garbage: walking through it takes a collection 0.15 s, and copies pages.
    gc.freeze()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(
            target=_end_with, args=(parent.sentinel, directory), name="controller watch", daemon=True
        ).start()


def leave(code: int, pipe: Connection) -> NoReturn:
    """End the process without finalizing Python, for the reason in the module's docstring."""
    _flush()
    pipe.close()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    _flush()
    with _removing:
        os._exit(code)


def _redirect(files: RankFiles) -> None:
    """Send stdout, stderr and stacks to the rank's files."""
    _flush()
    output = os.open(files.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    global _stack_file
    stack_file = open(files.stack, "a")  # noqa: SIM115
    faulthandler.enable(file=stack_file, all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    _stack_file = stack_file


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a test may have closed it
            continue


#: Held while the case's directory is removed. The thread that finds nothing left to remove must not end the process
#: before the other one has finished.
_removing = threading.Lock()


def remove_directory(directory: Path) -> None:
    """
    Remove a case's directory, in which other ranks may be creating files at this moment.

    It gets another name first: a file created during `rmtree` would keep the directory in existence.
    """
    doomed = directory.with_name(f"{directory.name}-{os.getpid()}")
    with _removing:
        try:
            directory.rename(doomed)
        except OSError:  # another rank was quicker, or it is gone
            return
        shutil.rmtree(doomed, ignore_errors=True)


def _end_with(sentinel: int, first: Path) -> None:
    """When the controller has ended, remove the files of the case and end this process and its children."""
    multiprocessing.connection.wait([sentinel])
    run = context.current().run
    # A rank that got ready before its case has a directory from that time, too.
    for directory in dict.fromkeys([first, *([run.order.case.directory] if run is not None else [])]):
        remove_directory(directory)
    os.killpg(os.getpgrp(), signal.SIGKILL)
