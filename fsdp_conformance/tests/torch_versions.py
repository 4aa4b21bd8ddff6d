"""
The features that older versions of torch lack. A test that needs one is skipped with that reason.

Where only a run shows whether a test needs it, as with the many that train FSDP2 on the CPU, the error tells:
`limit_of`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from torch.torch_version import TorchVersion

#: Before 2.7, gloo has no averages, and torch binds groups and batches messages only on devices of the type "cuda".
OLD = torch.__version__ < TorchVersion("2.7")

#: Before 2.9, gloo's reduce-scatter sums whatever reduction it is asked for, and before 2.7 it takes no lists: its
#: all-reduces get no options (pytorch/pytorch#149869 shows the line).
GLOO_ALWAYS_SUMS = torch.__version__ < TorchVersion("2.9")

#: Before 2.7, FSDP2 raises on the CPU; before 2.9, it sums gradients there (docs/continuous-integration.md).
FSDP2_TRAINS_ON_THE_CPU = torch.__version__ >= TorchVersion("2.9")


def _since(version: str, before: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.__version__ < TorchVersion(version), reason=f"before torch {version}, {before}")


not_on_old = _since("2.7", "this cannot be done")
with_fsdp2_on_the_cpu = _since("2.9", "FSDP2 does not train on the CPU as it should")

#: What DTensor costs and draws, and how gloo says that a peer is late. When it changed is not known exactly.
as_since_2_10 = _since("2.10", "torch did this differently")
as_since_2_11 = _since("2.11", "torch did this differently")


class Limit(NamedTuple):
    """An error that torch itself raises before some version."""

    before: str
    error: str
    """A pattern of its text, with the line of torch that raises it where others could."""
    reason: str


LIMITS = (
    Limit(
        "2.7",
        r"_fully_shard/_fsdp_\w+\.py\", line(.|\n)*'Stream' object has no attribute 'record_event'",
        "FSDP2 does not train on the CPU",
    ),
    Limit("2.7", r"fully_shard of torch \S+ has no ignored_params", "FSDP2 cannot ignore parameters"),
    Limit("2.7", r"ProcessGroupGloo does not support reduce_scatter", "gloo has no reduce-scatter of lists"),
    Limit("2.7", r"checkpoint/utils\.py(.|\n)*Global rank 0 is not part of group", "no checkpoints in a group"),
    Limit("2.7", r"save\(\) got an unexpected keyword argument 'no_dist'", "no checkpoint of one rank"),
    Limit("2.7", r"create_pg\(\) takes 2 positional arguments", "torch's test class makes groups in another way"),
    Limit("2.7", r"--stress needs torch 2\.7 or newer", "there is no --stress"),
    Limit(
        "2.10", r"cannot import name 'ReduceScatter' from 'torch\.distributed\.fsdp", "FSDP2 is not told how to reduce"
    ),
    Limit("2.10", r"c10d\.ReduceOp \(of Python.*does not have a field with name 'op'", "no reductions in Python"),
    Limit("2.10", r"c10d\.ProcessGroup' object has no attribute '(get_group_store|split_group)'", "no such method"),
    Limit("2.10", r"The input size 0, plus negative padding 0", "DTensor cannot divide tensors without elements"),
    Limit("2.10", r"from_dlpack\(\) got an unexpected keyword argument 'device'", "from_dlpack takes no device"),
    Limit("2.11", r"Number of microbatches \(1\) must be greater than or equal", "pipelines need more micro-batches"),
    Limit("2.10", r"No module named 'torch\.distributed\._composable\.replicate_with_fsdp'", "there is no such engine"),
    Limit("2.13", r"has gradients None and is expecting to send gradients", "a pipeline's input must need a gradient"),
)


def limit_of(text: str) -> Limit | None:
    """The limit of the installed torch that the text of a failure shows."""
    for limit in LIMITS:
        if torch.__version__ < TorchVersion(limit.before) and re.search(limit.error, text):
            return limit
    return None
