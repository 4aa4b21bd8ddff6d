"""
ZeRO-3: a second backward through one forward raises an error of autograd about sizes, which does not say what is wrong.

Expected: it works, or the error says that it is not possible. Seen with DeepSpeed 0.19.8 (torch 2.13.0, gloo, CPU):
"The size of tensor a (0) must match the size of tensor b (4)".
Run: python ci/findings/deepspeed/second_backward.py
Upstream: https://github.com/deepspeedai/DeepSpeed/pull/8045 (open) is exact; reported as issue 3539 of 2023 (closed).
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise a C++ extension is compiled
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = {"train_batch_size": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
output = engine(torch.ones(1, 4))
got = "no error"
try:
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(output.sum(), retain_graph=True)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(output.square().sum())
except RuntimeError as error:
    got = str(error).splitlines()[0]
wrong = "size" in got
print(f"a second backward: expected no error, or one about the second backward, got {got!r}")
dist.destroy_process_group()
print("WRONG" if wrong else "right")
sys.exit(wrong)
