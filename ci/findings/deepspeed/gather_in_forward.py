"""
ZeRO-3: a parameter that is read in a forward, with GatheredParameters, breaks the forward once it is prefetched.

Expected: the context shows the full value and leaves no trace, as its documentation has it used in a forward, or it
raises on entry, in the first step. Seen with DeepSpeed 0.19.8 and torch 2.13 on the CPU: two steps pass; in the third,
whose gathers are prefetched, leaving the context raises RuntimeError "Cannot free a ZeRO-3 parameter while it is still
active in submodules".
Run: torchrun --nproc-per-node 2 ci/findings/deepspeed/gather_in_forward.py
Upstream: no report of this found (searched November 2026). https://github.com/deepspeedai/DeepSpeed/issues/7811
(closed) is the same error after an in-place edit.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # it reads the variable

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def main() -> None:
    """Three steps; before the second layer of each forward, user code looks at the weight of the last one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    # Otherwise a C++ extension is compiled at first use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG, dist_init_required=False)
    norms = []

    def look(*_: object) -> None:
        with deepspeed.zero.GatheredParameters(model[3].weight), torch.no_grad():
            norms.append(float(model[3].weight.norm()))

    model[1].register_forward_pre_hook(look)
    problem = ""
    try:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
    except RuntimeError as error:
        problem = str(error)
    if dist.get_rank() == 0:
        print(f"contexts that were left without an error: {len(norms)}")
        print(f"expected no error, got: {problem}" if problem else "expected and got no error")
        print("WRONG" if problem else "right", flush=True)
    dist.destroy_process_group()
    raise SystemExit(bool(problem))


if __name__ == "__main__":
    main()
