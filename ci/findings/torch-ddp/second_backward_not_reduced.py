"""
DistributedDataParallel: of two backwards through one forward only the first is reduced, and ranks diverge.

Expected: gradients are those of the sum of both losses, averaged, or an error. Seen with torch 2.13.0 (gloo, CPU): the
second backward adds this rank's own gradients, and nothing raises.
Run: torchrun --nproc-per-node 2 ci/findings/torch-ddp/second_backward_not_reduced.py
Upstream: https://github.com/pytorch/pytorch/issues/47260 (open), of the same with several forwards.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
output = model(torch.full((1, 1), float(dist.get_rank())))  # the gradient is 0 on rank 0 and 1 on rank 1
output.sum().backward(retain_graph=True)
output.sum().backward()
grad = model.module.weight.grad.item()
wrong = torch.tensor([float(grad != 1.0)])
dist.all_reduce(wrong)
print(f"rank {dist.get_rank()}: gradient after two backwards: expected 1.0, got {grad}")
if dist.get_rank() == 0:
    print("WRONG" if wrong else "right")
dist.destroy_process_group()
raise SystemExit(int(wrong.item() > 0))
