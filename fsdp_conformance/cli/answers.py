"""Lines of JSON from a child process, as they come: the parent's side of a child that imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

from fsdp_conformance.cli.processes import end_family


@contextlib.contextmanager
def answers(module: str, words: Sequence[str], *, timeout_s: float | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """
    What `python -m MODULE WORDS...` prints; when the block is left, the child and all its descendants are ended.

    A child that fails has a last answer {"what": "died", "how": ..., "output": ...}.
    """
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        watch = None if timeout_s is None else threading.Timer(timeout_s, end_family, [child.pid])
        if watch is not None:
            watch.daemon = True
            watch.start()
        try:
            yield _lines(child, errors, timeout_s)
        finally:
            if watch is not None:
                watch.cancel()
            end_family(child.pid)
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _lines(child: subprocess.Popen[str], errors: IO[bytes], timeout_s: float | None) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None, "the child is started with a pipe"
    for line in child.stdout:
        # What torch prints is not an answer.
        with contextlib.suppress(ValueError):
            yield json.loads(line)
    # Not reaped yet, so its pid cannot be reused before its group is ended.
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    if ended is None or (ended.si_code == os.CLD_EXITED and ended.si_status == 0):
        return
    how = f"ended with status {ended.si_status}"
    if ended.si_code != os.CLD_EXITED:
        how = f"was ended by {signal.Signals(ended.si_status).name}"
        how += f"; its limit is {timeout_s:.0f} s" if timeout_s is not None else ""
    errors.seek(0)
    yield {"what": "died", "how": how, "output": errors.read().decode(errors="replace")[-1500:]}
