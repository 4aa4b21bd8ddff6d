"""
A directory for the temporary files of one run of the tests, which is removed with all that is in it.

Some files have no owner who could remove them: torchrun leaves its directory of logs after every job, and processes
that tests kill leave their sockets and logs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.util import Finalize

#: Short, because the paths of sockets are limited to about a hundred characters.
PREFIX = "fsdp-tests-"


def keep_apart() -> None:
    """From now on this process and those that it starts have their temporary files there; it is removed at exit."""
    # pytest's own directories stay where they are, to be looked at after a failure; it deletes all but the last few.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    directory = tempfile.mkdtemp(prefix=PREFIX)
    # After multiprocessing has removed its own directory, which has priority -100. Not called in forks.
    Finalize(None, shutil.rmtree, args=(directory,), kwargs={"ignore_errors": True}, exitpriority=-200)
    tempfile.tempdir = os.environ["TMPDIR"] = directory
