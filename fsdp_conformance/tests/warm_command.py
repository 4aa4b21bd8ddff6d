"""
As a command, this says where the server of its ranks comes from: `test_warm_interpreter` runs it.

A module of the package, because only its commands are adapted to forks that have imported torch.
"""

from __future__ import annotations

import sys

from fsdp_conformance.harness.processes.forkserver import ForkedServer, import_and_fork, server_for

if __name__ == "__main__":
    has_torch = "torch" in sys.modules
    import_and_fork()
    print(has_torch, isinstance(server_for(), ForkedServer))
