"""What the command's exit status says."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Exit statuses; 128 and more is the number of the signal that interrupted the command, as shells have it."""

    CERTIFIED = 0
    """Also: every check of `smoke` or `doctor` held, or what was asked for was shown."""
    NOT_CERTIFIED = 1
    """Also: `smoke` found problems in the adapter."""
    USAGE = 2
    """An option, a file or an implementation is not what it should be."""
    ENVIRONMENT = 3
    """This machine lacks what was asked for: a device, a backend, a package, room on the disk."""
    SUITE = 4
    """The suite itself failed, so nothing is said about the implementation."""
    SCRIPT_FAILED = 5
    """Of `sanitize`: the script itself did not come to its end, and no hazard was found until then."""
    INTERRUPTED = 130
    """Ctrl-C; what was judged before is in the run file. 143 for SIGTERM, 129 for SIGHUP."""


#: For the help text.
TABLE = """\
exit status:
  0    certified, or nothing was wrong
  1    not certified: the findings say why
  2    wrong usage: an option, a file, an adapter that cannot be imported
  3    this machine lacks what was asked for: a device, a backend, room on the disk
  4    the suite itself failed
  130  interrupted by Ctrl-C; what was judged before is in the run file
"""

#: For the help text of `sanitize`.
SANITIZE_TABLE = """\
exit status:
  0    clean: accesses were checked, and each waits for what it depends on
  1    hazards were found (also if the script then failed)
  2    wrong usage: an option, a script that is not there, or one that never used the device
  3    this machine lacks what is needed: a C++ compiler
  4    the suite itself failed
  5    the script failed: it raised, died, or did not end in time
  130  interrupted by Ctrl-C; hazards found until then are printed
"""
