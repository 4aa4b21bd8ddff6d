"""
Digests: what must be identical on every rank, as hashes that the controller compares.

Each rank hashes what it reads itself. Nothing is gathered, so a wrong gather cannot hide a difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
from torch import Tensor

from fsdp_conformance.checks.traffic import TRAINING, in_step
from fsdp_conformance.history.collective import POINT_TO_POINT
from fsdp_conformance.history.training import TrainingHistory


def digest(tensor: Tensor) -> str:
    """SHA-256 over dtype, shape and bytes. The sign of zero counts, and so do the bits of NaN."""
    on_cpu = tensor.detach().cpu().contiguous()
    sha256 = hashlib.sha256(f"{on_cpu.dtype} {tuple(on_cpu.shape)}".encode())
    sha256.update(on_cpu.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()


def parameter_digests(history: TrainingHistory, *, exclude: Collection[str] = ()) -> dict[str, str]:
    """
    Label to hash of every full parameter: "params init 0.weight", "params step 2 0.weight".

    `exclude` lists the parameters that differ between ranks by design: experts, and those of ignored modules.
    """
    moments = {"init": history.initial_params}
    moments |= {f"step {index}": record.params for index, record in enumerate(history.steps)}
    return {
        f"params {moment} {name}": digest(value)
        for moment, parameters in moments.items()
        for name, value in parameters.items()
        if name not in exclude
    }


def schedule_digests(history: TrainingHistory) -> dict[str, str]:
    """
    {"schedule step 0": digest} over phase, op, reduction, bytes, dtype and group size of each collective of training
    and evaluation.

    Equal on all ranks if all ranks issue the same sequence (R067). Collectives over one rank are left out, because no
    other rank takes part in them, and so are sends and receives: where one rank sends, another one receives.
    """
    digests = {}
    for step in history.steps:
        sha256 = hashlib.sha256()
        for record in in_step(history, step.step, *TRAINING, "eval"):
            if record.op in POINT_TO_POINT:
                continue
            entry = (record.phase, record.op.value, record.reduce_op, record.nbytes, record.dtype, len(record.group))
            sha256.update(f"{entry}\n".encode())
        digests[f"schedule step {step.step}"] = sha256.hexdigest()
    return digests
