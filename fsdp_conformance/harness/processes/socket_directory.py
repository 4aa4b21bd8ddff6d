"""
A directory with a path short enough for sockets: an address holds about a hundred bytes (unix(7), `sun_path`).

`multiprocessing` puts its sockets below `tempfile.gettempdir()`, which a batch system may have set to a long path;
binding such a socket fails with "AF_UNIX path too long".
"""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.util
import os
import shutil
import sys
import tempfile
from typing import Any

from fsdp_conformance.errors import EnvironmentUnavailable

#: Bytes of an address, with a terminating zero.
LIMIT = 104 if sys.platform == "darwin" else 108

#: What `multiprocessing` appends to the directory: "/pymp-" and "/listener-", each with eight random characters.
_APPENDED = len("/pymp-12345678/listener-12345678") + 1

#: Where programs may put sockets, whatever TMPDIR says.
SHORT = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - mkdtemp makes the directory there


def prepare() -> None:
    """
    Make `multiprocessing` use a short directory for this process's sockets if its own would be too long.

    The directory is removed when the process ends. Raises EnvironmentUnavailable if no short directory is writable.
    """
    configuration: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    usual = tempfile.gettempdir()
    if configuration.get("tempdir") is not None or len(os.fsencode(usual)) + _APPENDED <= LIMIT:
        return
    for place in SHORT:
        if os.access(place, os.W_OK | os.X_OK):
            directory = tempfile.mkdtemp(prefix="pymp-", dir=place)
            multiprocessing.util.Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=-100)
            configuration["tempdir"] = directory
            return
    raise EnvironmentUnavailable(
        f"TMPDIR must be at most {LIMIT - _APPENDED} bytes long, got {usual!r}: sockets go below it, and none of "
        f"{', '.join(SHORT)} is writable"
    )
