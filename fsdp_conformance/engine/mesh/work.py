"""A collective along a mesh that is under way, and the tensor that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Work

from fsdp_conformance.engine.errors import EngineError
from fsdp_conformance.engine.streams import Streams


class MeshWork:
    """
    What every mesh collective returns at once: `wait()` gives its result.

    Until then what was given to it must not be written, and what it writes into must not be read. `work` is None where
    nothing had to be sent. `finish` makes the result of what has arrived; `buffers` are the tensors that are sent,
    received, or read by it.
    """

    def __init__(self, work: Work | None, finish: Callable[[], Tensor], buffers: Sequence[Tensor]) -> None:
        self._work = work
        self._finish: Callable[[], Tensor] | None = finish
        self._buffers = tuple(buffers)
        self._streams = Streams(buffers[0].device)
        self._issued_on = self._streams.current()

    def then(self, step: Callable[[Tensor], Tensor]) -> MeshWork:
        """This collective, with `step` making its result of what was its result."""
        finish = self._finish
        if finish is None:
            raise EngineError("then() of a collective that was waited for, but should come before", where="MeshWork")
        self._finish = lambda: step(finish())
        return self

    def wait(self) -> Tensor:
        """
        The result, ready for the current stream; on the CPU and with gloo it is there. Again: the same tensor.

        The host runs on where the backend orders streams. Raises what the collective raises.
        """
        if self._finish is not None:
            if self._work is None:
                self._streams.follow([self._issued_on])
            else:
                self._work.wait()
            for buffer in self._buffers:
                self._streams.keep(buffer, self._issued_on)
            with torch.no_grad():
                self._result = self._finish()
            self._work = self._finish = None
            self._buffers = ()
        return self._result


def nothing_sent(result: Tensor) -> MeshWork:
    """A collective that is over: its ranks had nothing to tell each other."""
    return MeshWork(None, lambda: result, [result])


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, 1D: backends move bytes whatever they can compute with."""
    return tensor.view(-1).view(torch.uint8)
