"""
A try of an accelerator's backend, before anything is judged.

NCCL makes its communicator at the first collective on the device. A container with little shared memory, a broken link
between GPUs, or a network that is configured wrongly fail there, or hang: that is the environment's fault, and would be
blamed on the engine if its own collective were the first.
"""

from __future__ import annotations

import time

import torch
from torch import distributed

from fsdp_conformance.errors import EnvironmentUnavailable
from fsdp_conformance.harness import devices

#: Between two looks at a collective that runs on the device.
_LOOK_S = 0.005

_NUMEL = 4


def try_backend(device: torch.device, *, timeout_s: float) -> None:
    """
    All-reduce a few numbers on the device, and read them on the host. Collective.

    Raises EnvironmentUnavailable if the backend raises, is wrong, or has not finished after `timeout_s`.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    where = f"an all-reduce on {device} of rank {rank} of {size}, before the case began,"
    try:
        numbers = torch.full((_NUMEL,), float(rank + 1), device=device)
        work = distributed.all_reduce(numbers, async_op=True)
        if devices.is_scarce(device.type) and not _is_done(work, timeout_s):
            raise EnvironmentUnavailable(
                f"{where} did not finish within {timeout_s:.0f} s. {_ADVICE} A link between the GPUs may be broken: "
                "try NCCL_P2P_DISABLE=1, and NCCL_IB_DISABLE=1."
            )
        work.wait()
        got = numbers.cpu()
    except EnvironmentUnavailable:
        raise
    except Exception as error:
        raise EnvironmentUnavailable(f"{where} raised {type(error).__name__}: {error} [{_ADVICE}]") from error
    expected = torch.full((_NUMEL,), float(size * (size + 1) // 2))
    if not torch.equal(got, expected):
        raise EnvironmentUnavailable(
            f"{where} gave {got.tolist()}, expected {expected.tolist()}: communication is wrong on this machine. "
            + _ADVICE
        )


#: Advice for the user.
_ADVICE = "Run `fsdp-conformance doctor --device TYPE`, with NCCL_DEBUG=INFO for what NCCL says."


def _is_done(work: distributed.Work, timeout_s: float) -> bool:
    """True if the collective has finished on the device in time. `wait` would only order streams, or block forever."""
    until = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_S)
    return True
