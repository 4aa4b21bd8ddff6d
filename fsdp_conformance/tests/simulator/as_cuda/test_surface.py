"""Every public name of torch about CUDA and distribution has an entry in the table, and is what the entry says."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.torch_version import TorchVersion

from fsdp_conformance.simulated_cuda import simulated_cuda
from fsdp_conformance.simulator.as_cuda import surface
from fsdp_conformance.simulator.as_cuda.names import NotSimulated
from fsdp_conformance.simulator.as_cuda.surface import Status
from fsdp_conformance.tests.simulator.as_cuda.torch_names import Name, names
from fsdp_conformance.tests.simulator.simulator_process import compiled, in_process_of_its_own

#: The version of torch whose names the table has.
WRITTEN_FOR = "2.13"

pytestmark = [compiled, pytest.mark.slow]


def status_of(name: Name) -> Status | None:
    entry = surface.table().get(name.module)
    return entry.statuses.get(name.name) if entry is not None else None


def entries(status: Status) -> Iterator[tuple[str, Any, str]]:
    """The names with a status that this version of torch has, with the values that they have now, and the reasons."""
    for module, entry in surface.table().items():
        owner: Any = pytest.importorskip(module) if module != "torch.Tensor" else torch.Tensor
        for name, one in entry.statuses.items():
            if one is status and hasattr(owner, name):
                yield f"{module}.{name}", getattr(owner, name), entry.reasons.get(name, "")


def needs_no_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of C++
        return False
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(one.default is not one.empty or one.kind in variable for one in parameters)


def answers(module: str) -> dict[str, Any]:
    """The answers of the functions of a module that need no argument."""
    return {
        name: value()
        for status in (Status.OWN, Status.TORCH)
        for name, value, _ in entries(status)
        if name.rpartition(".")[0] == module and inspect.isfunction(value) and needs_no_argument(value)
    }


@in_process_of_its_own
def test_every_name_has_an_entry() -> None:
    """A version of torch with new names fails here, with their list. Older ones may have names that are gone since."""
    unknown = [str(name) for name in names(surface.left_out()) if status_of(name) is None]
    if torch.__version__ < TorchVersion(WRITTEN_FOR):
        unknown = []

    assert not unknown, (
        f"surface.toml must have every public name of torch {torch.__version__}; it has not: {', '.join(unknown)}. "
        f"Find out what they do under CUDA's names, and put them under own, torch, refused or listed."
    )


@in_process_of_its_own
def test_names_are_what_their_entries_say() -> None:
    """Own names are replaced, torch's are not, and a name is the same in every module that has it."""
    before = names(surface.left_out())
    with simulated_cuda(2):
        for name in before:
            status = status_of(name)
            if status is None:  # the test above lists it
                continue
            assert name.changed == (status in (Status.OWN, Status.REFUSED)), (str(name), status)
            for module, value in name.elsewhere.items():
                assert value is name.now, f"{name} is replaced, {module}.{name.name} is not"
    assert [str(name) for name in before if name.now is not name.value] == []


@in_process_of_its_own
def test_refused_names_raise_their_reason() -> None:
    """With any arguments, and without."""
    with simulated_cuda(1):
        refused = list(entries(Status.REFUSED))
        assert len(refused) > 40
        for name, value, why in refused:
            for arguments in ((), (1, 2)):
                with pytest.raises(NotSimulated) as caught:
                    value(*arguments)
                assert str(caught.value) == f"{name} has no counterpart on the simulated accelerator: {why}"


@in_process_of_its_own
def test_queries_of_cuda_answer() -> None:
    """Every function that needs no argument can be called, and takes what torch's takes; nothing says "sim"."""
    before = {name: value for name, value in vars(torch.cuda).items() if inspect.isfunction(value)}
    with simulated_cuda(2), warnings.catch_warnings(action="ignore", category=FutureWarning):
        assert len(got := answers("torch.cuda")) > 40
        assert [name for name, answer in got.items() if "sim:" in repr(answer)] == []
        for name, value, _ in entries(Status.OWN):
            original = before.get(name.rpartition(".")[2])
            if original is not None and inspect.isfunction(value) and name.startswith("torch.cuda."):
                wanted = inspect.signature(original).parameters
                assert _takes(value, wanted), f"{name} must take {', '.join(wanted)}"


@in_process_of_its_own
def test_queries_of_a_group_answer_for_cuda() -> None:
    """As a program with NCCL expects."""
    with simulated_cuda(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=HashStore())
        said = {name: getattr(dist, name)() for name in dir(dist) if name.startswith(("is_", "get_")) and _asks(name)}
        dist.destroy_process_group()
    assert said["get_backend_config"] == "cuda:nccl"
    assert said["get_backend"] == "nccl"
    assert said["is_nccl_available"]
    assert [name for name, answer in said.items() if "sim" in repr(answer)] == []


def _takes(function: Callable[..., Any], names: Iterable[str]) -> bool:
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True


def _asks(name: str) -> bool:
    """True if the function needs no argument, and does not want torchrun's environment."""
    return name != "get_node_local_rank" and needs_no_argument(getattr(dist, name))
