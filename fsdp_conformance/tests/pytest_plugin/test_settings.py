"""Settings from what was typed, and their way to the workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_conformance import run_settings
from fsdp_conformance.errors import ConfigError
from fsdp_conformance.run_settings import RunSettings


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The settings of this process come from the run of these tests."""
    before = run_settings.current(), run_settings.description()
    yield
    run_settings.use(*before)


def test_nothing_typed_is_the_default() -> None:
    """None stands for it."""
    assert run_settings.from_words() == RunSettings()


def test_everything_typed_is_taken() -> None:
    """Numbers from words, lists from commas and repetition, each once."""
    made = run_settings.from_words(
        implementation="my.py:Mine",
        profile="sample",
        device="cuda",
        world_sizes=["2,4", "3", "2"],
        cases=["R001", " R002 , R001/a-ws2"],
        requirements=["R003"],
        bindings=["R003,R004"],
        chapters=["A", "A,G"],
        scopes=["base,offload"],
        capabilities=["hsdp", "no_sync,hsdp"],
        fail_fast=True,
        report_dir="out",
        reuse_ranks=True,
        deadline_scale="0.5",
    )

    assert made == RunSettings(
        implementation="my.py:Mine",
        profile="sample",
        device="cuda",
        world_sizes=(2, 4, 3),
        cases=("R001", "R002", "R001/a-ws2"),
        requirements=("R003",),
        bindings=("R003", "R004"),
        chapters=("A", "G"),
        scopes=("base", "offload"),
        capabilities=("hsdp", "no_sync"),
        fail_fast=True,
        report_dir="out",
        reuse_ranks=True,
        deadline_scale=0.5,
    )


def test_slots_are_a_number_or_what_fits() -> None:
    """0 stands for what fits."""
    slots = [
        run_settings.from_words(device="cuda", slots_per_device=word).slots_per_device for word in (None, "3", "auto")
    ]

    assert slots == [1, 3, 0]


def test_stress_has_a_seed() -> None:
    """The same one every time, unless the user names another."""
    seeds = [run_settings.from_words(stress=True, stress_seed=word).stress_seed for word in (None, "0", "12")]

    assert seeds == [1, 0, 12]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"implementation": " "}, "implementation must not be blank, got ' '"),
        ({"report_dir": ""}, "report_dir must not be blank, got ''"),
        ({"device": "cuda:1"}, "device must be a type such as cpu, sim or cuda, without an index, got 'cuda:1'"),
        ({"world_sizes": ["0"]}, "world_size must be a positive integer, got '0'"),
        ({"world_sizes": ["-2"]}, "world_size must be a positive integer, got '-2'"),
        ({"stress_seed": "3"}, "stress_seed is for a stress run: add --stress, got stress_seed=3"),
        ({"stress_failure": "kill"}, "stress_failure is for a stress run: add --stress, got stress_failure=kill"),
        (
            {"stress": True, "stress_failure": "explode"},
            "stress_failure must be one of raise, collective, exit, kill, stop, any, got 'explode'",
        ),
        ({"stress": True, "stress_seed": "-1"}, "stress_seed must be a non-negative integer, got '-1'"),
        (
            {"stress": True, "ranks": "simulated"},
            "ranks must be processes with stress: simulated ranks take turns, so nothing can be late",
        ),
        (
            {"ranks": "simulated", "device": "cuda"},
            (
                "device must be cpu or sim with simulated ranks, got 'cuda': copies between threads are not ordered by "
                "its streams. Use --ranks processes; add --share-devices if there are fewer devices than ranks"
            ),
        ),
        (
            {"share_devices": True},
            "device must be cuda or sim with share_devices, got 'cpu': on the CPU any number of ranks can run",
        ),
        (
            {"backend": "nccl"},
            "backend must be nccl with --device cuda, simccl with --device sim, got 'nccl' with device 'cpu'",
        ),
        (
            {"backend": "nccl", "device": "cuda", "share_devices": True},
            "backend must be omitted with share_devices, which needs gloo, got 'nccl'",
        ),
        (
            {"backend": "simccl", "device": "sim", "ranks": "simulated"},
            "backend must be omitted with simulated ranks, got 'simccl'",
        ),
        (
            {"slots_per_device": "0", "device": "cuda"},
            "slots_per_device must be a positive integer or 'auto', got '0'",
        ),
        (
            {"slots_per_device": "2"},
            "slots_per_device must be omitted with device 'cpu', where any number of cases can run at a time",
        ),
        (
            {"slots_per_device": "2", "device": "cuda", "share_devices": True},
            "slots_per_device must be omitted with share_devices, where no rank owns a device",
        ),
        (
            {"slots_per_device": "auto", "device": "cuda", "ranks": "torchrun"},
            "slots_per_device must be omitted with torchrun, which runs one case at a time",
        ),
        ({"share_devices": True, "device": "xpu"}, "device must be cuda or sim with share_devices, got 'xpu'"),
        (
            {"share_devices": True, "device": "sim", "ranks": "simulated"},
            "ranks must be 'processes' with share_devices, got 'simulated'",
        ),
        (
            {"share_devices": True, "device": "cuda", "ranks": "torchrun"},
            "ranks must be 'processes' with share_devices, got 'torchrun'",
        ),
        ({"deadline_scale": "fast"}, "deadline_scale must be a positive number, got 'fast'"),
        ({"deadline_scale": "inf"}, "deadline_scale must be a positive number, got 'inf'"),
        ({"deadline_scale": "nan"}, "deadline_scale must be a positive number, got 'nan'"),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, Any], problem: str) -> None:
    """The error quotes the word that was typed."""
    with pytest.raises(ConfigError) as raised:
        run_settings.from_words(**words)

    assert raised.value.problems == (problem,)


@pytest.mark.parametrize(
    "words",
    [{"ranks": "simulated", "device": "sim"}, {"ranks": "simulated"}, {"share_devices": True, "device": "cuda"}],
)
def test_what_can_be_is_not(words: dict[str, Any]) -> None:
    """Threads on the simulated accelerator and on the CPU, and processes that share a GPU."""
    assert run_settings.from_words(**words).share_devices is ("share_devices" in words)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        run_settings.from_words(device="a b", world_sizes=["x", "y"], deadline_scale="0")

    assert len(raised.value.problems) == 4


def test_an_order_survives_the_way_to_a_rank() -> None:
    """Through JSON, which knows no tuples; a field of another version is ignored."""
    made = RunSettings(
        world_sizes=(2, 3), cases=("R001",), chapters=("A",), last_failed=("R001/a-ws2",), fail_fast=True,
        deadline_scale=2.0,
    )  # fmt: skip
    order = run_settings.RunOrder(settings=made, description={"name": "mine"})
    data = json.loads(order.to_json())
    data["settings"]["colour"] = "green"

    assert run_settings.order_from_json(json.dumps(data)) == order


def test_what_is_used_is_current() -> None:
    """With the description that the controller has asked for."""
    run_settings.use(RunSettings(device="cuda"), {"name": "mine"})

    assert run_settings.current().device == "cuda"
    assert run_settings.description() == {"name": "mine"}
    run_settings.use(RunSettings())
    assert run_settings.description() is None
