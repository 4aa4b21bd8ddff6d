"""
Engines that train well, and hold more memory than their plan leaves them, where no allocator of tensors sees it.

Each is FSDP2 that keeps bytes beside it, as many as the model or its gradients have.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fsdp_conformance.adapters.base import ModelFn, OptimFn
from fsdp_conformance.adapters.sharded import local_part
from fsdp_conformance.adapters.vendors.torch_fsdp2 import TorchFSDP2
from fsdp_conformance.plan import Plan


class Hoards(TorchFSDP2):
    """Keeps something at the end of each step."""

    def setup(self, model_fn: ModelFn, optim_fn: OptimFn, plan: Plan) -> None:
        super().setup(model_fn, optim_fn, plan)
        self.kept: list[Any] = []
        self.steps_done = 0
        self.numel = sum(parameter.numel() for parameter in self.parameters().values())
        self.begin()

    def step(self, max_norm: float | None = None, *, norm_type: float = 2.0) -> Tensor | None:
        self.before_update()
        norm = super().step(max_norm, norm_type=norm_type)
        self.hold()
        self.steps_done += 1
        return norm

    def begin(self) -> None:
        """Called once the model is wrapped."""

    def before_update(self) -> None:
        """Called when the gradients are complete."""

    def hold(self) -> None:
        """Called at the end of each step."""


class ArraysOfEveryThirdStep(Hoards):
    """A copy of the model as an array of NumPy, in every third step."""

    def hold(self) -> None:
        if self.steps_done % 3 == 0:
            self.kept.append(np.ones(self.numel, dtype=np.float32))


class BytesInHalfPrecision(Hoards):
    """A copy of the model as bytes, in every step, with two bytes for each element."""

    def hold(self) -> None:
        self.kept.append(b"x" * (2 * self.numel))


class GradientsInSharedMemory(Hoards):
    """The gradients of every step, in shared memory."""

    def before_update(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters().values() if parameter.grad is not None]
        self.kept += [local_part(gradient).clone().share_memory_() for gradient in gradients]


class OptimizerStateOfAThread(Hoards):
    """The optimizer's state after every step, of which only a thread knows."""

    def hold(self) -> None:
        state = [tensor.clone() for tensor in self.local_tensors()["optim"]]
        ready = threading.Event()

        def keep(mine: list[Tensor]) -> None:
            held = mine.copy()
            mine.clear()
            ready.set()
            threading.Event().wait(3600)
            held.clear()

        threading.Thread(target=keep, args=(state,), daemon=True).start()
        ready.wait()


class MappedUntilTheFirstStep(Hoards):
    """A copy of the model in an anonymous mapping, from wrap until the first step has ended."""

    def begin(self) -> None:
        mapped = mmap.mmap(-1, 4 * self.numel)
        mapped.write(b"x" * (4 * self.numel))
        self.kept.append(mapped)

    def hold(self) -> None:
        self.kept.clear()


class FilesInMemory(Hoards):
    """A copy of the model in a memory file, from the first step on."""

    def hold(self) -> None:
        if not self.kept:
            self.kept.append(os.memfd_create("copy"))
            os.write(self.kept[0], b"x" * (4 * self.numel))

    def close(self) -> None:
        for descriptor in self.kept:
            os.close(descriptor)
        super().close()


class CopiesInAChild(Hoards):
    """A copy of the model in another process, in every step."""

    writer: ClassVar[int] = -1

    def begin(self) -> None:
        reader, self.told = os.pipe()
        answers, self.answered = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            with contextlib.suppress(BaseException):
                os.close(self.told)
                copies = []
                while os.read(reader, 1):
                    copies.append(b"x" * (4 * self.numel))
                    os.write(self.answered, b".")
            os._exit(0)
        os.close(reader)
        self.answers = answers

    def hold(self) -> None:
        os.write(self.told, b".")
        os.read(self.answers, 1)

    def close(self) -> None:
        os.close(self.told)
        os.waitpid(self.child, 0)
        os.close(self.answers)
        os.close(self.answered)
        super().close()


class HalfACopyOnTheHost(Hoards):
    """From the first step on, a copy of the model in bfloat16 that no tensor of Python refers to."""

    def hold(self) -> None:
        if not self.kept:
            self.kept.append(torch.ones(self.numel, dtype=torch.bfloat16).untyped_storage())
