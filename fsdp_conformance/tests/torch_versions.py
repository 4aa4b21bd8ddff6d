"""What older versions of torch lack, for tests that need it: each such test says so when it is skipped."""

from __future__ import annotations

import pytest
import torch

#: Before 2.7, gloo has no averages, and torch binds groups and batches messages only on devices of the type "cuda".
OLD = torch.__version__ < "2.7"

#: Before 2.9, gloo's reduce-scatter sums whatever reduction it is asked for, and before 2.7 it takes no lists: its
#: all-reduces get no options (pytorch/pytorch#149869 shows the line).
GLOO_ALWAYS_SUMS = torch.__version__ < "2.9"

#: Before 2.7, FSDP2 raises on the CPU; before 2.9, it sums gradients there (docs/continuous-integration.md).
FSDP2_TRAINS_ON_THE_CPU = torch.__version__ >= "2.9"

not_on_old = pytest.mark.skipif(OLD, reason=f"torch {torch.__version__} cannot do this: 2.7 can")
with_fsdp2_on_the_cpu = pytest.mark.skipif(
    not FSDP2_TRAINS_ON_THE_CPU, reason=f"FSDP2 of torch {torch.__version__} does not train on the CPU as it should"
)
