"""The words of CUDA in those of the simulated accelerator."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from fsdp_conformance.simulator.as_cuda import names as cuda_names


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("cuda", "sim"),
        ("cuda:3", "sim:3"),
        ("cpu", "cpu"),
        ("cudagraphs", "cudagraphs"),
        ("cuda:x", "cuda:x"),
        (3, 3),
        (None, None),
    ],
)
def test_only_names_of_devices_are_translated(word: Any, expected: Any) -> None:
    """Other words that merely begin like a device name stay as they are."""
    assert expected == cuda_names.simulated(word)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("nccl", "simccl"),
        ("NCCL", "simccl"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,sim:simccl"),
        ("cuda:nccl, cpu:gloo", "sim:simccl,cpu:gloo"),
        ("gloo", "cpu:gloo,sim:simccl"),
        ("mpi", "mpi"),
        (None, None),
    ],
)
def test_nccl_is_the_simulated_collectives(backend: Any, expected: Any) -> None:
    """nccl is accepted alone or together with a backend for the CPU."""
    assert expected == cuda_names.simulated_backend(backend)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("gloo", True),
        ("Gloo", True),
        ("cpu:gloo,cuda:gloo", True),
        ("cpu:gloo, cuda:nccl", False),
        ("nccl", False),
        ("cpu:gloo", False),
        (None, None),
    ],
)
def test_gloo_may_be_asked_for_on_gpus(backend: Any, expected: bool | None) -> None:
    """gloo is requested by its name alone, or for CUDA; without a backend the choice is open."""
    assert cuda_names.asks_for_gloo(backend) is expected


def test_map_location_keeps_the_names_that_files_have() -> None:
    """Only the targets of a mapping are translated, because files say cuda."""
    assert {"cuda:0": "sim:1"} == cuda_names.simulated_map({"cuda:0": "cuda:1"})
    assert cuda_names.simulated_map("cuda:1") == "sim:1"


def test_arguments_are_translated_by_place_and_by_name() -> None:
    """Words alone; the rest goes through untouched."""

    def seen(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert (("sim:1", 5), {"device": "sim", "other": "x"}) == cuda_names.translated(seen)(
        "cuda:1", 5, device="cuda", other="x"
    )


def test_a_stand_in_makes_and_recognises_the_real_ones() -> None:
    """isinstance keeps its meaning, `|` works for annotations, and pickles are the real class's."""
    stand_in = cuda_names.stand_in(torch.device)

    made = stand_in("cpu")
    assert type(made) is torch.device
    assert isinstance(made, stand_in)
    assert not isinstance("cpu", stand_in)
    assert isinstance(made, stand_in | None)
    assert pickle.loads(pickle.dumps(made)) == made
    assert (stand_in.__module__, stand_in.__qualname__) == ("torch", "device")


def test_who_asks_is_known_by_the_file() -> None:
    """This test counts as a script; a function of torch does not."""

    def asks() -> bool:
        return cuda_names.script_asks()

    asked_by_torch = eval(compile("asks()", torch.__file__, "eval"), {"asks": asks})

    assert asks()
    assert not asked_by_torch
