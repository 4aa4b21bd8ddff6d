"""Makes the libraries of a device allocate what they keep, before memory is counted."""

from __future__ import annotations

import torch

#: What cases compute in: the matrix products of each dtype may use separate handles.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: The width of the layer that is used for warming up, as small as the tests' own and aligned for every library.
_WIDTH = 16


def warm_up(device: torch.device) -> None:
    """
    One forward and backward of a layer in each dtype that a case computes in.

    On CUDA, cuBLAS takes a workspace from the caching allocator for each of its handles and streams: megabytes, besides
    bounds of a hundred kilobytes. A handle belongs to a thread, and a backward runs in one of autograd's.
    """
    for dtype in _DTYPES:
        try:
            # Constants, so that no random number is drawn.
            inputs, weight = (torch.ones(_WIDTH, _WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in "xw")
            bias = torch.ones(_WIDTH, device=device, dtype=dtype, requires_grad=True)
            torch.nn.functional.linear(inputs, weight, bias).sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError):  # the device lacks the dtype, so no case computes in it
            continue
