"""
A directory for the temporary files of one run of the tests, which is removed with all that is in it.

Some files have no owner who could remove them: torchrun leaves its directory of logs after every job, and processes
that tests kill leave their sockets and logs.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

#: Short, because the paths of sockets are limited to about a hundred characters.
PREFIX = "fsdp-tests-"


def keep_apart() -> None:
    """From now on this process and those that it starts have their temporary files there; it is removed at exit."""
    # pytest's own directories stay where they are, to be looked at after a failure; it deletes all but the last few.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    directory, owner = tempfile.mkdtemp(prefix=PREFIX), os.getpid()

    def remove() -> None:
        # A fork that ends in the usual way comes here, too.
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    # Registered first, so called last, after servers have ended.
    atexit.register(remove)
    tempfile.tempdir = os.environ["TMPDIR"] = directory
