"""The child process itself: `python -m fsdp_conformance.cli.jobs`."""

from __future__ import annotations

import sys

from fsdp_conformance.cli import child

if __name__ == "__main__":
    sys.exit(child.serve(sys.argv[1:]))
