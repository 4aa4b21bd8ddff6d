"""The job of `cli.survey`: what the machine has and what the implementation declares, without starting a device."""

from __future__ import annotations

from fsdp_conformance import codec
from fsdp_conformance.adapters import registry
from fsdp_conformance.cli.child import Answer
from fsdp_conformance.cli.survey import Machine
from fsdp_conformance.errors import EnvironmentUnavailable


def run(answer: Answer, device: str, implementation: str) -> None:
    """Answer with the machine first: if the adapter's module ends this process, it shows that torch can be imported."""
    answer("machine", **machine_here(device).to_json())
    answer("implementation", **codec.plain(registry.describe_here(implementation)))


def machine_here(device: str) -> Machine:
    """The machine of this process; counts devices without starting any."""
    import importlib.metadata

    from fsdp_conformance.cases.places import place_of
    from fsdp_conformance.harness import devices, leases
    from fsdp_conformance.plan import SIMULATED
    from fsdp_conformance.simulator.device import build

    here, simulated = place_of(device), place_of(SIMULATED)
    backend, problem = "", here.problem
    try:
        # For a type that torch does not know, the count says more than torch's error.
        backend = devices.backend_for(device) if here.num_ranks != 0 and not problem else ""
    except EnvironmentUnavailable as error:
        problem = str(error)
    return Machine(
        torch=importlib.metadata.version("torch"),
        device=device,
        backend=backend,
        problem=problem,
        present=here.present,
        num_devices=devices.device_count("cpu" if device == SIMULATED else device),
        num_ranks=here.num_ranks,
        simulated=simulated,
        simulator_built=build.is_built(),
        auto_slots=leases.slots_of(device, 0),
    )
