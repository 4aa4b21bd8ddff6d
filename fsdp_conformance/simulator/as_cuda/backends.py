"""
`torch.backends` as programs see it: there are CUDA and cuDNN, and kernels of attention that accept what CUDA's accept.

torch itself gets the truth, so that it takes no path that needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.backends.cuda
import torch.backends.cudnn

from fsdp_conformance.simulator.as_cuda.names import script_asks
from fsdp_conformance.simulator.device import SIMULATED, build
from fsdp_conformance.simulator.replacements import Replacements

__all__ = ["install"]

#: The one that torch 2.13 brings for CUDA_VERSION.
_CUDNN_VERSION = 91002


def install(replaced: Replacements) -> None:
    """Replace the functions."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    _for_script(replaced, cudnn, "version", _CUDNN_VERSION)
    _for_script(replaced, cudnn, "is_available", True)
    _for_script(replaced, cuda, "is_built", True)
    _for_script(replaced, cuda, "is_flash_attention_available", True)
    kernels = ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention")
    for place, name in enumerate(kernels):
        if hasattr(cuda, name):  # not in every version
            replaced.set(cuda, **{name: _can_use(place, getattr(cuda, name))})
    original = cudnn.is_acceptable

    @functools.wraps(original)
    def is_acceptable(tensor: torch.Tensor) -> Any:
        if tensor.device.type != SIMULATED or not script_asks():
            return original(tensor)  # type: ignore[no-untyped-call]
        return torch._C._get_cudnn_enabled() and tensor.dtype in cudnn.CUDNN_TENSOR_DTYPES

    replaced.set(cudnn, is_acceptable=is_acceptable)


def _can_use(place: int, original: Callable[..., bool]) -> Callable[..., bool]:
    """True if CUDA's kernel accepts the inputs: see attention.cpp."""

    @functools.wraps(original)
    def can_use(params: Any, debug: bool = False) -> bool:
        if params.query.device.type != SIMULATED:
            return original(params, debug)
        grouped = getattr(params, "enable_gqa", False)  # not in every version
        accepted = build.active().attention_kernels(
            params.query, params.key, params.value, params.attn_mask, params.is_causal, grouped
        )
        return bool(accepted[place])

    return can_use


def _for_script(replaced: Replacements, module: Any, name: str, answer: object) -> None:
    """The script gets an answer of its own."""
    original: Callable[[], object] = getattr(module, name)

    @functools.wraps(original)
    def answering() -> object:
        return answer if script_asks() else original()

    replaced.set(module, **{name: answering})
