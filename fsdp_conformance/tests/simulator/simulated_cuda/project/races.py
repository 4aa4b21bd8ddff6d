"""A race, in a test, in a fixture, and where it is expected."""

import multiprocessing
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.testing._internal.common_utils import TestCase


def race() -> torch.Tensor:
    data = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        data.mul_(2)  # the default stream has not been waited for
    return data


def test_race() -> None:
    race()


def test_no_race() -> None:
    data = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        data.mul_(2)
    side.synchronize()
    assert data.sum() == 8


def test_race_and_failure() -> None:
    assert race().sum() == 0


class TestRace(TestCase):
    def test_race_in_a_class(self) -> None:
        race()


@pytest.fixture
def racing() -> torch.Tensor:
    return race()


def test_race_in_a_fixture(racing: torch.Tensor) -> None:
    assert racing is not None


def test_race_in_a_program() -> None:
    program = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__}; {__name__}.race()"
    subprocess.run([sys.executable, "-c", program], timeout=300, check=True)


def test_race_in_a_forked_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=race)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_race_in_a_process_that_is_killed(simulated_cuda) -> None:  # type: ignore[no-untyped-def]
    program = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__}; {__name__}.race(); input()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not simulated_cuda.hazards() and time.monotonic() < deadline:
        threading.Event().wait(0.05)  # its file appears while it runs
    process.kill()
    process.communicate()
    assert len(simulated_cuda.take_hazards()) == 1


@pytest.mark.simulated_cuda(hazards="report")
def test_race_that_is_reported() -> None:
    race()


@pytest.mark.simulated_cuda(hazards="off")
def test_race_that_is_not_looked_for() -> None:
    race()


def test_race_that_is_expected(simulated_cuda) -> None:  # type: ignore[no-untyped-def]
    race()
    (hazard,) = simulated_cuda.take_hazards()
    assert hazard.now.site.innermost().function == "race"
    assert simulated_cuda.hazards() == ()
    assert simulated_cuda.device_count == torch.cuda.device_count()


@pytest.mark.xfail(strict=True)
def test_race_that_is_known() -> None:
    race()
