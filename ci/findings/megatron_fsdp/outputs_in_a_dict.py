"""
megatron_fsdp.fully_shard_model: under ZeRO-1, gradients are reduced twice if the model returns a dict.

Expected: the mean over the ranks, as of a model that returns a tuple. Got with megatron-fsdp 0.6.1: the hook that
begins a backward is put on outputs that are tensors, tuples or lists. Otherwise it is on the module that was registered
last, and what has been reduced before its backward is reduced again. CUDA's streams are replaced, so that it runs on
the CPU.
Run: torchrun --nproc-per-node 2 ci/findings/megatron_fsdp/outputs_in_a_dict.py
Upstream: no report found (searched November 2026).
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

for name in ("Stream", "Event", "current_stream", "stream", "synchronize", "empty_cache", "device"):
    setattr(torch.cuda, name, MagicMock())
torch.cuda.current_device = lambda: 0
torch.Tensor.cuda = lambda tensor: tensor
torch.Tensor.record_stream = lambda tensor, stream: None
from megatron_fsdp import fully_shard_model, fully_shard_optimizer  # noqa: E402

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
options = {"dp_shard_dim": "dp", "tp_dim": "tp", "device": torch.device("cpu"), "zero_dp_strategy": 1}


class Unit(torch.nn.Sequential):
    pass


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.second, self.first = Unit(torch.nn.Linear(4, 4)), Unit(torch.nn.Linear(4, 4))

    def forward(self, x):
        return {"first": self.first(x), "second": self.second(x)}


model = fully_shard_model(Model(), mesh, fsdp_unit_modules=[Unit], **options)
model.ddp_config.gradient_reduce_div_fusion = False  # needs NCCL
fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
outputs = model(torch.full((1, 4), 1.0 + 2 * dist.get_rank()))
sum(output.sum() for output in outputs.values()).backward()
weight = dict(model.param_and_grad_buffer.optimizer_named_parameters)["second.0.weight"]
got = weight.grad.to_local().flatten()[0].item()
print(f"mean of the gradients 1 and 3: expected 2.0, got {got}\n{'right' if got == 2.0 else 'WRONG'}")
dist.destroy_process_group()
sys.exit(got != 2.0)
