"""
Modules that start the CUDA driver when they are imported: ranks on GPUs must import them by themselves.

A child forked from a process that has started the driver cannot use a GPU. Some engines start it at import, so a warm
server that has imported one is replaced by a server without it, and each rank pays for the import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from fsdp_conformance.harness.processes import preload
from fsdp_conformance.harness.processes.forkserver import WarmServer, server_for, start_process

#: Selects a separate server: one that has imported a module cannot be without it.
WITHOUT = "FSDP_CONFORMANCE_WARM_WITHOUT"

#: The module that starts CUDA in a server, or None, by the server's modules and variables.
_known: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], str | None] = {}


def server_without_cuda(
    modules: tuple[str, ...], variables: Mapping[str, str], *, engine: tuple[str, ...] = ()
) -> WarmServer:
    """
    A server that has imported `modules`, and those of the engine, except those that start CUDA.

    What every rank needs is not left out: if torch itself starts the driver, the ranks report it.
    """
    everything = harmless = (*modules, *engine)
    left_out = ""
    while True:
        server = server_for(
            tuple(name for name in modules if name in harmless),
            {**variables, WITHOUT: left_out} if left_out else variables,
            engine=tuple(name for name in engine if name in harmless),
        )
        key = (harmless, frozenset(variables.items()))
        if key not in _known:
            _known[key] = _ask(server)
        culprit = _known[key]
        if culprit is None or culprit not in harmless:
            return server
        harmless = tuple(name for name in harmless if name != culprit)
        left_out = ",".join(name for name in everything if name not in harmless)


def _ask(server: WarmServer) -> str | None:
    """The module whose import has started CUDA in the server, as a fork of it finds."""
    ours, theirs = Pipe()
    try:
        process = start_process(_tell, theirs, server=server, name="cuda imports")
    finally:
        theirs.close()
    with ours:
        culprit: str | None = json.loads(ours.recv_bytes())
    process.join()
    return culprit


def _tell(pipe: Connection) -> None:
    pipe.send_bytes(json.dumps(preload.cuda_initialised_by).encode())
