"""
The flat buffer in which the gradients of a chunk are gathered, and from which they are reduced.

It has the layout of the chunk, in the dtype of the reduction. It is not zeroed beforehand: a gradient that arrives
first is copied, later ones are added, and what never came is zeroed once, before the reduction. One pass over the
memory where zeroing and accumulating would take two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_conformance.engine.chunks.layout import ChunkLayout
from fsdp_conformance.engine.chunks.memory_pool import Block
from fsdp_conformance.engine.errors import TensorRefused


class GradientBuffer:
    """
    Gradients of one chunk, accumulated over as many backwards as the caller likes.

    `payload` is 1D and contiguous, as long as the chunk. `block` is what it was leased as, and goes back when it has
    been reduced; `owned` says that it is nobody else's memory and may become the result; `in_payload`, that it is the
    unsharded chunk itself. `holds_all`: every gradient is in it already.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        payload: Tensor,
        *,
        block: Block | None = None,
        owned: bool = False,
        in_payload: bool = False,
        holds_all: bool = False,
    ) -> None:
        self.payload = payload
        self.block = block
        self.owned = owned
        self.in_payload = in_payload
        self.holds_all = holds_all
        self.present = [holds_all] * len(layout.slots)
        """For each tensor, whether its gradient has arrived."""
        self._layout = layout
        self._views: list[Tensor] | None = None

    @property
    def views(self) -> list[Tensor]:
        """The gradients, in the shapes of their tensors. What has not arrived is not initialised."""
        if self._views is None:
            self._views = self._make_views()
        return self._views

    def view(self, index: int) -> Tensor:
        """
        A view to accumulate one gradient into: zero, unless something has arrived.

        It counts as arrived from now on. Autograd adds into it in place if it is the parameter's `grad`.
        """
        view = self.views[index]
        if not self.present[index]:
            with torch.no_grad():
                view.zero_()
            self.present[index] = True
        return view

    def put(self, index: int, gradient: Tensor) -> None:
        """
        Copy a gradient in, cast to the buffer's dtype, or add it to what has arrived.

        The gradient is not needed afterwards (on the current stream). Raises TensorRefused for one that does not fit.
        """
        self._check([index], [gradient])
        view = self.views[index]
        # Detached rather than under no_grad: a hook calls this once for each parameter.
        if self.present[index]:
            view.add_(gradient.detach())
        else:
            view.copy_(gradient.detach())
            self.present[index] = True

    @torch.no_grad()
    def put_all(self, gradients: Sequence[Tensor | None]) -> None:
        """
        `put` for every tensor of the chunk, in their order; None: it got no gradient.

        Raises TensorRefused naming everything that does not fit; then nothing was put.
        """
        if len(gradients) != len(self.present):
            raise TensorRefused(
                f"{len(gradients)} gradients, but should be {len(self.present)}, one for each tensor of the chunk",
                where="GradientBuffer.put_all",
            )
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        arriving = [gradient for gradient in gradients if gradient is not None]
        self._check(given, arriving)
        first: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for index, gradient in zip(given, arriving, strict=True):
            (more if self.present[index] else first).append((self.views[index], gradient))
            self.present[index] = True
        if first:
            torch._foreach_copy_([view for view, _ in first], [gradient for _, gradient in first])
        if more:
            torch._foreach_add_([view for view, _ in more], [gradient for _, gradient in more])

    @torch.no_grad()
    def complete(self) -> None:
        """Zero what never arrived, gaps and padding."""
        layout = self._layout
        for begin, end in layout.gaps if all(self.present) else layout.uncovered(self.present):
            self.payload[begin:end].zero_()

    def _make_views(self) -> list[Tensor]:
        """Views of the payload; those of the block's last tenant, if that had its tensors in the same places."""
        if self.block is None:
            return self._layout.views(self.payload)
        known = self.block.views
        if known is None or known[0] != self._layout.slots:
            known = self.block.views = (self._layout.slots, self._layout.views(self.payload))
        return known[1]

    def _check(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        slots, device = self._layout.slots, self.payload.device
        problems: list[str] = []
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient.layout is not torch.strided:
                problems.append(f"gradient {index} is {gradient.layout}, but should be torch.strided")
            elif gradient.shape != slots[index].shape or gradient.device != device:
                problems.append(
                    f"gradient {index} is {tuple(gradient.shape)} on {gradient.device}, "
                    f"but should be {tuple(slots[index].shape)} on {device}"
                )
        if problems:
            raise TensorRefused(problems, where="GradientBuffer")
