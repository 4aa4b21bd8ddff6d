"""
The pytest plugin: options, order of cases, verdicts as outcomes, the run file.

    options       what can be typed, and the order that it makes
    items         what happens to a case in the process that runs it
    dealing       which worker of pytest-xdist runs which case next, where ranks own their devices
    dispatch      which cases run at the same time on the devices of a machine
    controller    the run file, and what the run has shown
    embedded      cases as tests of a user's own test suite

pytest loads it in every environment that has this package installed, so loading it imports only the table of options
(`run_settings`) and no torch, and it leaves tests alone that are not conformance cases. One process writes the run
file: the controller. Cases run there or in the workers of pytest-xdist, whose reports carry the records over.

The outcome of a case is its record's verdict, whatever the test method did: PASS passes; UNSUPPORTED, NOT_RUN_ENV and
DISABLED skip; all others fail. A test that ends without a record is ERROR_SUITE. If the whole profile was run and
earned no certificate, the exit status is not 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fsdp_conformance.pytest_plugin import options
from fsdp_conformance.pytest_plugin.controller import Controller
from fsdp_conformance.pytest_plugin.items import Cases

if TYPE_CHECKING:
    from fsdp_conformance.run_settings import RunSettings


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a conformance run."""
    options.add(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options that were given, and let the controller write the run file."""
    config.addinivalue_line("markers", "conformance: a case of fsdp-conformance, judged in this test suite")
    config.pluginmanager.register(Cases(config), "fsdp-conformance-cases")
    if hasattr(config, "workerinput"):
        return
    fail_fast = options.given(config) and options.settings_of(config).fail_fast
    if fail_fast:
        config.option.maxfail = 1
    # Each worker of pytest-xdist gets one case at a time. It runs all that it was sent, even after the first failure,
    # and a case that waits for a deadline would hold up those queued behind it.
    unset = getattr(config.option, "maxschedchunk", 1) is None
    if fail_fast or (unset and options.targets_suites(config)):
        config.option.maxschedchunk = 1
    config.pluginmanager.register(Controller(config), "fsdp-conformance-controller")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Make `-n auto` as many workers as fit on the devices. Runs of other tests are left alone."""
    if not options.targets_suites(config):
        return None
    from fsdp_conformance.harness import devices

    with options.usage_errors():
        entries = options.selected_entries(config)
        # More workers than fit for the largest world have smaller cases at hand; fewer would leave devices idle.
        smallest = min((entry.world_size for entry in entries if entry.world_size > 1), default=1)
        settings = options.settings_of(config)
        per_device = _slots_per_device(settings)
        return devices.slots(settings.device, smallest, shared=settings.share_devices, per_device=per_device)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> Any:
    """Where ranks own their devices, deal the cases to workers as they fit. Elsewhere, pytest-xdist does it."""
    if not options.targets_suites(config) or config.getoption("dist", default="no") != "load":
        return None
    from fsdp_conformance.harness import devices

    settings = options.settings_of(config)
    if settings.share_devices or not devices.is_scarce(settings.device):
        return None
    count = devices.device_count(settings.device)
    if not count:
        return None
    from xdist.workermanage import parse_tx_spec_config

    from fsdp_conformance.pytest_plugin.dealing import DevicesScheduling, sizes_by_node_id
    from fsdp_conformance.pytest_plugin.dispatch import Slots

    sizes = sizes_by_node_id(str(config.getoption("conformance_suites")))
    return DevicesScheduling(len(parse_tx_spec_config(config)), Slots(count, _slots_per_device(settings)), sizes)


def _slots_per_device(settings: RunSettings) -> int:
    """How many cases may use a device at the same time."""
    if settings.slots_per_device == 1:
        return 1
    from fsdp_conformance.harness import leases

    return leases.slots_of(settings.device, settings.slots_per_device)
