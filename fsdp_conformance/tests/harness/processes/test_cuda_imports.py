"""A module that starts CUDA when it is imported: ranks on GPUs get a server without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness.processes import cuda_imports, forkserver, preload, rank_process
from fsdp_conformance.harness.processes.cuda_imports import WITHOUT, server_without_cuda
from fsdp_conformance.tests.harness.test_torchrun_dealing import orders

#: What such an engine does, as far as a process without a GPU can: the driver counts as started from here on.
STARTS_CUDA = "import torch\ntorch.cuda.is_initialized = lambda: True\n"


class Servers:
    """Servers that say which of their modules has started CUDA."""

    def __init__(self, *culprits: str) -> None:
        self.culprits = culprits
        self.requests: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def find(
        self, modules: tuple[str, ...], variables: Mapping[str, str], *, engine: tuple[str, ...]
    ) -> tuple[str, ...]:
        return modules + engine

    def ask(self, server: tuple[str, ...]) -> str | None:
        self.requests.append((server, {}))
        return next((name for name in server if name in self.culprits), None)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    cuda_imports._known.clear()
    yield
    cuda_imports._known.clear()


def found(monkeypatch: pytest.MonkeyPatch, servers: Servers, *modules: str) -> Any:
    monkeypatch.setattr(cuda_imports, "server_for", servers.find)
    monkeypatch.setattr(cuda_imports, "_ask", servers.ask)
    return server_without_cuda(modules, {})


def test_every_module_that_starts_cuda_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are left out one after another, and each server is asked once."""
    servers = Servers("engine", "kernels", "torch")

    assert found(monkeypatch, servers, "suite", "engine", "kernels") == ("suite",)
    assert found(monkeypatch, servers, "suite", "engine", "kernels") == ("suite",)
    assert len(servers.requests) == 3
    assert found(monkeypatch, servers, "suite") == ("suite",)


def test_what_every_rank_needs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch itself starts the driver, every server has it, and the ranks report it."""
    servers = Servers()
    servers.ask = lambda server: "torch.testing"  # type: ignore[method-assign]

    assert found(monkeypatch, servers, "suite", "engine") == ("suite", "engine")


@pytest.mark.nightly
def test_an_engine_that_starts_cuda(tmp_path: Path) -> None:
    """The new server has imported the rest."""
    engine = tmp_path / "starts_cuda.py"
    engine.write_text(STARTS_CUDA)
    # The server that the other tests use stays as it is.
    variables = {"FSDP_CONFORMANCE_TEST_VARIABLE": "starts cuda"}
    server = server_without_cuda((str(engine), "json.tool"), variables)

    assert server is forkserver.server_for(("json.tool",), {**variables, WITHOUT: str(engine)})
    assert str(engine) not in server.modules


def test_only_ranks_on_gpus_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank on the CPU, and one on the simulated accelerator, need no driver."""
    monkeypatch.setattr(preload, "cuda_initialised_by", "engine")
    for name in ("_redirect", "apply_variables", "apply_collective_timeout"):
        monkeypatch.setattr(rank_process, name, lambda value: None)
    for device in ("cpu", "sim"):
        rank_process.prepare_process(orders(tmp_path, device).for_ranks({})[0])
    with pytest.raises(EnvironmentUnavailable, match="importing engine initialised CUDA in the warm process"):
        rank_process.prepare_process(orders(tmp_path, "cuda").for_ranks({})[0])
