"""Lets time pass: on the host for the CPU, and on the current stream of a device that can sleep."""

from __future__ import annotations

import statistics
import time
from functools import lru_cache
from typing import Any

import torch

from fsdp_conformance.harness import devices
from fsdp_conformance.harness.simulated_ranks import scheduler as rank_scheduler

#: Cycles of one calibration sleep: about a millisecond at today's clock rates (1 to 2 GHz).
_CALIBRATION_CYCLES = 1_000_000
_CALIBRATION_RUNS = 3


def pause(milliseconds: float, device_type: str) -> None:
    """
    Let `milliseconds` pass before anything that is issued next.

    On a device that can sleep (CUDA, ROCm) the current stream sleeps and the host continues, so that a missing wait
    between streams shows. Otherwise the host sleeps, or lets other simulated ranks run.
    """
    device = _sleeping_device(device_type)
    scheduler = rank_scheduler.current()
    if device is not None:
        device._sleep(round(milliseconds * _cycles_per_ms(device_type)))
    elif scheduler is not None:
        scheduler.pause(milliseconds / 1000)
    else:
        time.sleep(milliseconds / 1000)


def calibrate(device_type: str) -> None:
    """Measure the device's clock now, so that the first `pause` does not: measuring makes the host wait."""
    if _sleeping_device(device_type) is not None:
        _cycles_per_ms(device_type)


def device_in_use() -> str:
    """The type of the accelerator that this process has initialised, or "cpu"."""
    accelerator = devices.present_accelerator()
    if accelerator is None:
        return "cpu"
    module = torch.get_device_module(accelerator.type)
    return accelerator.type if getattr(module, "is_initialized", lambda: True)() else "cpu"


def _sleeping_device(device_type: str) -> Any:
    """The module of a device that can sleep, or None."""
    if device_type in ("", "cpu"):
        return None
    module = torch.get_device_module(device_type)
    return module if hasattr(module, "_sleep") and hasattr(module, "Event") else None


@lru_cache(maxsize=8)
def _cycles_per_ms(device_type: str) -> float:
    """The device's cycles per millisecond: the median of a few short sleeps."""
    device = torch.get_device_module(device_type)
    figures: list[float] = []
    device._sleep(_CALIBRATION_CYCLES)  # the first launch loads the kernel
    for _ in range(_CALIBRATION_RUNS):
        start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        start.record()
        device._sleep(_CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        figures.append(_CALIBRATION_CYCLES / start.elapsed_time(end))
    return statistics.median(figures)
