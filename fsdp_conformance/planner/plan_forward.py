"""
One forward on the meta device, counted: for each unit the operations, and the bytes that autograd keeps for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


class ForwardCount:
    """One forward, counted: for each unit what it computes and what autograd keeps of it."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.flops = dict.fromkeys(modules, 0.0)
        self.kept_bytes = dict.fromkeys(modules, 0.0)
        self._running: list[str] = []
        self._seen = 0
        # Storages are held, so that no other one gets their address.
        self._kept: dict[int, torch.UntypedStorage] = {}

    def run(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        """Run it. Raises what forward raises."""
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            self._kept[storage._cdata] = storage
        counter = FlopCounterMode(display=False)
        keeping = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept)
        with self._watched(counter), counter, keeping, _FusedAttention():
            model(*inputs)

    @contextmanager
    def _watched(self, counter: FlopCounterMode) -> Iterator[None]:
        handles = []
        for name, module in self.modules.items():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name, counter)))
            handles.append(module.register_forward_hook(lambda *_: self._leave(counter)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, counter: FlopCounterMode) -> None:
        self._settle(counter)
        self._running.append(name)

    def _leave(self, counter: FlopCounterMode) -> None:
        self._settle(counter)
        self._running.pop()

    def _settle(self, counter: FlopCounterMode) -> None:
        """What was computed since the last time belongs to the unit that ran until now."""
        total = counter.get_total_flops()
        if self._running:
            self.flops[self._running[-1]] += total - self._seen
        self._seen = total

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            self._kept[storage._cdata] = storage
            self.kept_bytes[self._running[-1]] += storage.nbytes()
        return tensor


class _FusedAttention(TorchFunctionMode):
    """
    Attention without a mask by the fused kernel that accelerators have for it, which does not keep the weights.

    The meta device would take the plain one, and count a matrix of tokens by tokens for each head.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _attention(func, *args, **kwargs)


def _attention(
    plain: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    output: Tensor
    if attn_mask is not None or query.dim() != 4:
        output = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return output
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return output
