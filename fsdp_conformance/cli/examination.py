"""The findings of `examine`, as they come: the parent's side of the child in which `doctor` launches ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, Any

from fsdp_conformance.cli.processes import end_family

#: A machine that takes longer to launch four ranks is too slow for cases with a deadline of a minute.
TIMEOUT_S = 120.0


@contextlib.contextmanager
def examined(device: str, *, timeout_s: float = TIMEOUT_S) -> Iterator[Iterator[dict[str, Any]]]:
    """The child's findings; when the block is left, the child and all its descendants are ended."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "fsdp_conformance.cli.examine", device],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        watch = threading.Timer(timeout_s, end_family, [child.pid])
        watch.daemon = True
        watch.start()
        try:
            yield _answers(child, errors)
        finally:
            watch.cancel()
            end_family(child.pid)
            child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _answers(child: subprocess.Popen[str], errors: IO[bytes]) -> Iterator[dict[str, Any]]:
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
        how = f"was ended by {signal.Signals(ended.si_status).name}; its limit is {TIMEOUT_S:.0f} s"
    errors.seek(0)
    yield {"what": "died", "how": how, "output": errors.read().decode(errors="replace")[-1500:]}
